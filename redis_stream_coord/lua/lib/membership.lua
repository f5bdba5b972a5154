-- Who may speak for a member: the rows of the table in the protocol's section 3, in its order.
-- @include refuse
-- @include int
-- @include group
-- @include round
-- @include rebalance
-- @include correction
-- @error FENCED_MEMBER_EPOCH
-- @error METADATA_REGRESSION
-- @error SESSION_EXISTS
-- @error UNKNOWN_MEMBER_ID

-- Compare lifecycles. A peer of an older one starts anew; a record of an older one was restored from a backup.
local function check_incarnation(g, incarnation)
  if incarnation > g.incarnation then
    refuse('METADATA_REGRESSION', 'stored incarnation ' .. int(g.incarnation) .. ', seen ' .. int(incarnation))
  end
  if incarnation > 0 and incarnation < g.incarnation then
    refuse('FENCED_MEMBER_EPOCH', 'the group was deleted and created anew')
  end
end

-- Is what the member believes to own part of what it holds? Returns the first shard where it is not.
local function not_held(m, owned)
  for index, token in pairs(owned) do
    if m.assigned[index] ~= token and m.revoking[index] ~= token then return index end
  end
end

-- Check a heartbeat of a running session, and open a correction round if it has seen more than the record knows.
-- Parameters: g; log; held_leases; key of the events; arg of the heartbeat; now.
-- Returns: the member.
local function check_session(g, log, held_leases, events_key, arg, now)
  local m = group.member(g, arg.member)
  if not m then refuse('UNKNOWN_MEMBER_ID', arg.member .. correction.stranger(g, events_key, arg)) end
  if m.nonce ~= arg.nonce then
    local seen = correction.stranger(g, events_key, arg)
    refuse('FENCED_MEMBER_EPOCH', 'replaced by another session of the same member id' .. seen)
  end
  if correction.witnessed(g, m, arg) then correction.open(g, log, held_leases, m, arg, now) end
  -- In a round it takes the stored epoch over with the answer.
  if not g.round.open and arg.epoch < m.epoch - 1 then
    refuse('FENCED_MEMBER_EPOCH', 'stored member epoch ' .. int(m.epoch))
  end
  return m
end

-- A new session takes the place of an old one of the same member: assigned shards stay its own under new tokens, so
-- that the old process is fenced and nothing moves; revoking ones are free. In a correction round all are: what the old
-- session had in hand is unknown.
local function replace(g, log, m, now)
  local given_up = { m.revoking }
  if g.round.open then given_up[2] = m.assigned end
  round.settle(g.round, m.id)
  for index in pairs(g.round.open and {} or m.assigned) do
    local s = group.shard(g, index)
    s.token, s.dirty = rebalance.draw(g), true
    m.assigned[index] = s.token
  end
  for _, held in ipairs(given_up) do
    for index in pairs(held) do
      local s = group.shard(g, index)
      rebalance.free(g, s)
      rebalance.grant(g, log, s, now)
    end
  end
  -- What was held back until the old session had drained.
  rebalance.grant_pending(g, log, m, now)
end

-- Begin a session. The same join again gives the same session: its first reply may have been lost. A join that names
-- no session cannot replace a living one: it may have been delayed on the wire.
-- Returns: the member; whether its session begins here.
local function join(g, log, arg, now)
  local m = group.member(g, arg.member)
  if m and m.nonce == arg.nonce then return m, false end
  if m and m.nonce ~= arg.replaces then refuse('SESSION_EXISTS', m.nonce) end
  if m then
    replace(g, log, m, now)
    if m.state ~= 'active' then g.group_epoch = g.group_epoch + 1 end
    rebalance.note(log, 'member_rejoined', { 'member', m.id })
  else
    m = { id = arg.member, weight = arg.weight, assigned = {}, revoking = {}, pending = {} }
    g.members[m.id], g.member_count, g.group_epoch = m, g.member_count + 1, g.group_epoch + 1
    rebalance.note(log, 'member_joined', { 'member', m.id })
  end
  -- Above every version so far, so that a rejoin never reuses an epoch.
  m.nonce, m.epoch, m.joined_ms, m.state, m.dirty = arg.nonce, g.version + 1, now, 'active', true
  return m, true
end

-- A member says good-bye: it drains everything it has, and is gone when nothing is left.
local function leave(g, log, m, now)
  if m.state == 'leaving' then return end
  m.state, m.dirty, g.group_epoch = 'leaving', true, g.group_epoch + 1
  rebalance.note(log, 'member_leaving', { 'member', m.id })
  local order = {}
  for index in pairs(m.assigned) do order[#order + 1] = index end
  table.sort(order)
  for _, index in ipairs(order) do rebalance.revoke(g, log, group.shard(g, index), now) end
end

-- Of each active member: how many shards it is meant for, how many its weight gives it at least, room for one more.
local function shares(g)
  local found, total = {}, 0
  for id, m in pairs(g.members) do
    if m and m.state == 'active' then found[id], total = { count = 0, weight = m.weight }, total + m.weight end
  end
  for _, s in pairs(g.shards) do
    if found[s.target] then found[s.target].count = found[s.target].count + 1 end
  end
  for _, share in pairs(found) do
    local product = #g.order * share.weight
    share.floor = (product - product % total) / total
    share.room = share.count < share.floor + (product % total > 0 and 1 or 0)
  end
  return found
end

-- Choose who gets a shard whose holder has a stuck handler: the active member with the least load for its weight, other
-- than the holder. It gives one of its own in exchange where the target would not be balanced otherwise. Needs the
-- complete group.
local function reassign(g, log, m, s, now)
  local by_id, heir = shares(g), nil
  local spare = not by_id[m.id] or by_id[m.id].count > by_id[m.id].floor
  local function less(a, b)
    local one, other = by_id[a], by_id[b]
    if spare and one.room ~= other.room then return one.room end
    local here, there = one.count * other.weight, other.count * one.weight
    if here ~= there then return here < there end
    return a < b
  end
  for id, share in pairs(by_id) do
    local able = (spare and share.room) or share.count > 0
    if id ~= m.id and able and (not heir or less(id, heir)) then heir = id end
  end
  if not heir then return end
  local in_step = g.assignment_epoch == g.group_epoch
  g.group_epoch = g.group_epoch + 1
  rebalance.aim(g, log, s, heir, now)
  local swap
  for _, index in ipairs(g.order) do
    local other = g.shards[index]
    if other.target == heir and index ~= s.index then
      -- Rather what the heir has had for long: another one with a stuck handler must not come straight back.
      local mine = other.holder == heir
      if not swap or (mine and (swap.holder ~= heir or other.token < swap.token)) then swap = other end
    end
  end
  if swap and by_id[m.id] and not (spare and by_id[heir].room) then rebalance.aim(g, log, swap, m.id, now) end
  -- If something else has changed too, the whole target is computed anew right after.
  if in_step then g.assignment_epoch = g.group_epoch end
end

-- The member cannot use a grant. Either the shard's fence is ahead of it: the counter was lost in a failover. It jumps
-- ahead, and the shard is granted anew one lease later, when the fence's holder has noticed or expired. Or nobody has
-- it (`fence_token` is -1): the member has reported this very token as drained, or the group was moved on the shard; it
-- only needs another one. Or its handler is stuck (0): somebody else shall have the shard, or itself one lease later if
-- it is alone.
local function claim_refused(g, log, m, index, token, fence_token, now)
  if m.assigned[index] ~= token then return end
  local s = group.shard(g, index)
  if fence_token > g.grant_counter then
    rebalance.note(log, 'metadata_regression', { 'witness', 'fence', 'shard', int(index), 'grant_counter',
      int(g.grant_counter), 'fence_token', int(fence_token) })
    g.grant_counter = fence_token
  end
  if fence_token == 0 and not g.round.open then reassign(g, log, m, s, now) end
  local alone = fence_token == 0 and s.target == m.id
  if s.target == m.id then m.pending[index] = true end
  rebalance.free(g, s, (alone or fence_token >= token) and now + g.lease_ms or 0)
  rebalance.changed(log, m)
  rebalance.note(log, 'claim_refused', { 'shard', int(index), 'member', m.id, 'token', int(token), 'fence_token',
    int(fence_token) })
  rebalance.grant(g, log, s, now)
  if fence_token ~= 0 then return end
  -- The exchange may have ended a drain that others waited for, or have aimed at a shard that is free.
  for _, other in ipairs(g.order) do rebalance.grant(g, log, g.shards[other], now) end
end

-- What a coordinator would do for the whole stream is one member's duty for one heartbeat interval; then whoever comes
-- next gets it, most often the same. Two may do it at once: each step is recorded where it is done.
-- Returns: 1 if this member has it.
local function take_duty(g, m, now)
  if not g.members[m.id] or m.state ~= 'active' then return 0 end
  if now < g.duty_ms + g.heartbeat_ms then return g.on_duty == m.id and 1 or 0 end
  redis.call('HSET', g.key, 'duty', 'member=' .. m.id .. ' since_ms=' .. int(now))
  return 1
end

return { check_incarnation = check_incarnation, check_session = check_session, not_held = not_held, join = join,
  leave = leave, claim_refused = claim_refused, take_duty = take_duty }
