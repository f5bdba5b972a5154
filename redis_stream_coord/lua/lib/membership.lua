-- Who may speak for a member: the rows of the table in the protocol's section 3, in its order.
-- @include refuse
-- @include int
-- @include group
-- @include rebalance
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

-- Check a heartbeat of a running session. Parameters: g; arg of the heartbeat; owned: shard -> token.
-- Returns: the member, and the shard that it wrongly believes to own, if any.
local function check_session(g, arg, owned)
  local m = group.member(g, arg.member)
  if not m then refuse('UNKNOWN_MEMBER_ID', arg.member) end
  if m.nonce ~= arg.nonce then refuse('FENCED_MEMBER_EPOCH', 'replaced by another session of the same member id') end
  if arg.version > g.version or arg.assignment_epoch > g.assignment_epoch or arg.epoch > m.epoch then
    refuse('METADATA_REGRESSION', 'stored version ' .. int(g.version) .. ', assignment epoch '
      .. int(g.assignment_epoch) .. ', member epoch ' .. int(m.epoch) .. '; seen ' .. int(arg.version) .. ', '
      .. int(arg.assignment_epoch) .. ', ' .. int(arg.epoch))
  end
  if arg.epoch < m.epoch - 1 then refuse('FENCED_MEMBER_EPOCH', 'stored member epoch ' .. int(m.epoch)) end
  return m, not_held(m, owned)
end

-- A new session takes the place of an old one of the same member: assigned shards stay its own under new tokens, so
-- that the old process is fenced and nothing moves; revoking ones are free.
local function replace(g, log, m, now)
  for index in pairs(m.assigned) do
    local s = group.shard(g, index)
    g.grant_counter = g.grant_counter + 1
    s.token, s.dirty, m.assigned[index] = g.grant_counter, true, g.grant_counter
  end
  for index in pairs(m.revoking) do
    local s = group.shard(g, index)
    rebalance.free(g, s)
    rebalance.grant(g, log, s, now)
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

-- Choose who gets a shard whose holder has a stuck handler: the active member with the fewest shards, other than the
-- holder. To stay balanced it gives one of its own in exchange if it had as many. Needs the complete group.
local function reassign(g, log, m, s, now)
  local counts, heir = {}, nil
  for _, other in pairs(g.shards) do
    if other.target then counts[other.target] = (counts[other.target] or 0) + 1 end
  end
  for id, other in pairs(g.members) do
    if other and id ~= m.id and other.state == 'active' then
      local count, least = counts[id] or 0, heir and (counts[heir] or 0)
      if not heir or count < least or (count == least and id < heir) then heir = id end
    end
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
  if swap and (counts[heir] or 0) >= (counts[m.id] or 0) then rebalance.aim(g, log, swap, m.id, now) end
  -- If something else has changed too, the whole target is computed anew right after.
  if in_step then g.assignment_epoch = g.group_epoch end
end

-- The member cannot use a grant. Either the shard's fence is ahead of it: the counter was lost in a failover. It jumps
-- ahead, and the shard is granted anew one lease later, when the fence's holder has noticed or expired. Or the member
-- has reported this very token as drained (`fence_token` is the token itself), and only needs another one. Or its
-- handler is stuck (`fence_token` is 0): somebody else shall have the shard, or itself one lease later if it is alone.
local function claim_refused(g, log, m, index, token, fence_token, now)
  if m.assigned[index] ~= token then return end
  local s = group.shard(g, index)
  g.grant_counter = math.max(g.grant_counter, fence_token)
  if fence_token == 0 then reassign(g, log, m, s, now) end
  local alone = fence_token == 0 and s.target == m.id
  if s.target == m.id then m.pending[index] = true end
  rebalance.free(g, s, (alone or fence_token > token) and now + g.lease_ms or 0)
  rebalance.changed(log, m)
  rebalance.note(log, 'claim_refused', { 'shard', int(index), 'member', m.id, 'token', int(token), 'fence_token',
    int(fence_token) })
  rebalance.grant(g, log, s, now)
  if fence_token > 0 then return end
  -- The exchange may have ended a drain that others waited for, or have aimed at a shard that is free.
  for _, other in ipairs(g.order) do rebalance.grant(g, log, g.shards[other], now) end
end

return { check_incarnation = check_incarnation, check_session = check_session, join = join, leave = leave,
  claim_refused = claim_refused }
