-- What changes who owns what. Every function works on the loaded group and writes nothing; `group.save` does.
-- @include assignor
-- @include group
-- @include round
-- @include clock
-- @include int
-- @include leases

-- What one script run did: events to append, members to wake.
local function journal()
  return { events = {}, wake = {} }
end

local function note(log, type, fields)
  log.events[#log.events + 1] = { type = type, fields = fields }
end

local function changed(log, m)
  m.dirty, m.changed = true, true
  log.wake[m.id] = true
end

-- The shard is nobody's. Its target, if any, may take it from `hold_until` on.
local function free(g, s, hold_until)
  local m = s.holder and group.member(g, s.holder)
  if m then
    m.assigned[s.index], m.revoking[s.index], m.dirty = nil, nil, true
  end
  s.holder, s.state, s.deadline_ms, s.hold_until_ms, s.dirty = nil, 'free', 0, hold_until or 0, true
  if s.hold_until_ms > 0 then g.next_due_ms = math.min(g.next_due_ms, s.hold_until_ms) end
  if not s.readable then group.drop(g, s) end
end

-- The next token. Never below the server's clock: if the counter itself goes back, because Redis was restored and
-- nobody is left who could tell, a token of the time that was lost is not given a second time.
local function draw(g)
  g.now_us = g.now_us or clock.now_us()
  g.grant_counter = math.max(g.grant_counter + 1, g.now_us)
  return g.grant_counter
end

-- Give a free shard to its target, under a new token. A member that still drains something gets nothing new, and nobody
-- does while a correction round is open or an operator has frozen the group.
local function grant(g, log, s, now)
  if g.round.open or g.frozen then return end
  local m = s.state == 'free' and s.target and s.hold_until_ms <= now and group.member(g, s.target)
  if not m or m.state ~= 'active' or next(m.revoking) then return end
  s.holder, s.state, s.token, s.hold_until_ms, s.dirty = m.id, 'assigned', draw(g), 0, true
  m.assigned[s.index], m.pending[s.index] = s.token, nil
  changed(log, m)
  note(log, 'shard_granted', { 'shard', int(s.index), 'member', m.id, 'token', int(s.token) })
end

-- Give a member what waits for it.
local function grant_pending(g, log, m, now)
  local order = {}
  for index in pairs(m.pending) do order[#order + 1] = index end
  table.sort(order)
  for _, index in ipairs(order) do grant(g, log, group.shard(g, index), now) end
end

-- Ask a holder to drain a shard that it has.
local function revoke(g, log, s, now)
  local m = group.member(g, s.holder)
  s.state, s.deadline_ms, s.dirty = 'revoking', now + g.rebalance_ms, true
  m.assigned[s.index], m.revoking[s.index] = nil, s.token
  g.next_due_ms = math.min(g.next_due_ms, s.deadline_ms)
  changed(log, m)
  note(log, 'shard_revoking', { 'shard', int(s.index), 'member', m.id, 'token', int(s.token) })
end

-- The target came back to the holder before it let go: it keeps the shard under the same token.
local function keep(log, s, m)
  s.state, s.deadline_ms, s.dirty = 'assigned', 0, true
  m.revoking[s.index], m.assigned[s.index] = nil, s.token
  changed(log, m)
  note(log, 'revoke_cancelled', { 'shard', int(s.index), 'member', m.id, 'token', int(s.token) })
end

-- Change the target of one shard, and set its holder on the way there. Needs the complete group.
local function aim(g, log, s, id, now)
  local before = s.target and g.members[s.target]
  if before then before.pending[s.index], before.dirty = nil, true end
  s.target, s.dirty = id, true
  local m = g.members[id]
  if s.holder ~= id then m.pending[s.index], m.dirty = true, true end
  if s.state == 'assigned' and s.holder ~= id then
    revoke(g, log, s, now)
  elseif s.state == 'revoking' and s.holder == id then
    keep(log, s, m)
  end
end

-- A holder reported that it drained a shard. Shard and token have to match what it was asked to give up: a delayed
-- duplicate must not free a shard that came back.
local function revoked(g, log, m, index, token, now)
  if m.revoking[index] ~= token then return end
  local s = group.shard(g, index)
  free(g, s)
  note(log, 'shard_released', { 'shard', int(index), 'member', m.id, 'token', int(token) })
  grant(g, log, s, now)
  if not next(m.revoking) then grant_pending(g, log, m, now) end
end

-- Everything that a member holds is free, and the member gone.
local function remove(g, log, held_leases, m, type, now)
  if m.state == 'active' then g.group_epoch = g.group_epoch + 1 end
  local order = {}
  for index in pairs(m.assigned) do order[#order + 1] = index end
  for index in pairs(m.revoking) do order[#order + 1] = index end
  table.sort(order)
  note(log, type, { 'member', m.id, 'shards', table.concat(order, ',') })
  g.members[m.id], g.gone[m.id], g.member_count = false, true, g.member_count - 1
  leases.drop(held_leases, m.id)
  round.settle(g.round, m.id)
  for _, index in ipairs(order) do
    local s = group.shard(g, index)
    free(g, s)
    grant(g, log, s, now)
  end
end

-- Compute who should own what, and set the holders on the way there. Needs the complete group.
local function retarget(g, log, now)
  local members, owners, readable = {}, {}, {}
  for id, m in pairs(g.members) do
    if m and m.state == 'active' then members[#members + 1] = { id = id, weight = m.weight } end
  end
  for index, s in pairs(g.shards) do
    local target = s.target and g.members[s.target]
    owners[index] = target and target.state == 'active' and s.target or s.holder
  end
  for _, index in ipairs(g.order) do
    if g.shards[index].readable then readable[#readable + 1] = index end
  end
  local target, moved, pending = assignor.assign(readable, members, owners), 0, {}
  for _, index in ipairs(g.order) do
    local s, id = g.shards[index], target[index]
    if s.target ~= id then
      moved = moved + 1
      s.target, s.dirty = id, true
    end
    if s.state == 'assigned' and s.holder ~= id then
      revoke(g, log, s, now)
    elseif s.state == 'revoking' and s.holder == id then
      keep(log, s, g.members[id])
    end
    if id and s.holder ~= id then
      pending[id] = pending[id] or {}
      pending[id][index] = true
    end
  end
  for id, m in pairs(g.members) do
    local waits = pending[id] or {}
    if m and group.format_list(waits) ~= group.format_list(m.pending) then
      m.pending, m.dirty = waits, true
    end
  end
  g.assignment_epoch = g.group_epoch
  note(log, 'target_changed', { 'assignment_epoch', int(g.assignment_epoch), 'members', int(#members),
    'moved', int(moved) })
end

-- Bring an open correction round to its end: who has not come into step in time is fenced; then the target is computed
-- anew, whatever it was. Needs the complete group.
local function correct(g, log, held_leases, now)
  if not g.round.open then return end
  local late = {}
  for id in pairs(g.round.waits) do
    -- Of a member that is not there any more nobody has to wait for an answer either.
    if not g.members[id] then round.settle(g.round, id) end
    if g.members[id] and g.round.due_ms <= now then late[#late + 1] = id end
  end
  table.sort(late)
  for _, id in ipairs(late) do remove(g, log, held_leases, g.members[id], 'member_fenced', now) end
  if not round.over(g.round, g.lease_ms, now) then return end
  note(log, 'correction_round_closed', { 'round', g.round.id, 'took_ms', int(now - g.round.opened_ms) })
  g.round = { open = false, id = g.round.id, dirty = true }
  g.group_epoch, log.wake_all = g.group_epoch + 1, true
end

-- Everything that time brings about. Needs the complete group; leaves `next_due_ms` exact.
local function housekeep(g, log, held_leases, now)
  for _, id in ipairs(held_leases.expired) do
    local m = g.members[id]
    if m and not held_leases.set[id] then remove(g, log, held_leases, m, 'member_expired', now) end
  end
  for _, index in ipairs(g.order) do
    local s = g.shards[index]
    if s.state == 'revoking' and held_leases.away and s.deadline_ms < now + g.lease_ms then
      -- While Redis was away nobody could report a drain either.
      s.deadline_ms, s.dirty = now + g.lease_ms, true
    end
    if s.state == 'revoking' and s.deadline_ms <= now then
      remove(g, log, held_leases, g.members[s.holder], 'member_fenced', now)
    end
  end
  correct(g, log, held_leases, now)
  if g.group_epoch > g.assignment_epoch and not g.round.open then retarget(g, log, now) end
  g.next_due_ms = g.round.open and g.round.due_ms or 9007199254740991
  for _, index in ipairs(g.order) do
    local s = g.shards[index]
    if s.hold_until_ms > 0 and s.hold_until_ms <= now then s.hold_until_ms, s.dirty = 0, true end
    grant(g, log, s, now)
    local due = s.state == 'revoking' and s.deadline_ms or s.hold_until_ms
    if due > 0 then g.next_due_ms = math.min(g.next_due_ms, due) end
  end
end

return { journal = journal, note = note, changed = changed, draw = draw, aim = aim, free = free, grant = grant,
  grant_pending = grant_pending, revoke = revoke, revoked = revoked, remove = remove,
  housekeep = housekeep }
