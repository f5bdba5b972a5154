-- The record went backwards: Redis lost its last writes, or was restored from a backup. The record stays the truth.
-- What members report is evidence that something was lost, and never used to rebuild it; but before anything is granted
-- anew, all of them come into step with the record.
-- @include int
-- @include clock
-- @include group
-- @include round
-- @include rebalance
-- @include events

local function ahead(g, arg)
  return arg.version > g.version or arg.assignment_epoch > g.assignment_epoch
end

-- Does a live session bear witness to something that the record does not know? In an open round only who is in step
-- already: the record went back once more. The others have not taken over the older version yet, and join the round.
-- A copy of what a member sent before it was in step, come late, costs one more round and no more.
local function witnessed(g, m, arg)
  local unknown_round = arg.round ~= '-' and not g.round.open and arg.round ~= g.round.id
  return (ahead(g, arg) or arg.epoch > m.epoch or unknown_round) and not (g.round.open and g.round.waits[m.id])
end

-- Open a round. Nobody expires, however old the leases are: they were restored too.
local function open(g, log, held_leases, m, arg, now)
  group.complete(g)
  local waits = {}
  for id, member in pairs(g.members) do
    if member then
      waits[id], held_leases.set[id] = true, now + g.lease_ms
    end
  end
  for _, s in pairs(g.shards) do
    -- This deadline is of the past, and nobody knew of it.
    if s.state == 'revoking' then s.deadline_ms, s.dirty = now + g.rebalance_ms, true end
  end
  g.round = { open = true, id = int(clock.now_us()) .. '.' .. m.nonce, opened_ms = now, due_ms = now + g.rebalance_ms,
    strangers = false, waits = waits, dirty = true }
  g.next_due_ms = math.min(g.next_due_ms, g.round.due_ms)
  rebalance.note(log, 'metadata_regression', { 'witness', 'member', 'member', m.id, 'round', g.round.id, 'version',
    int(g.version), 'seen_version', int(arg.version), 'assignment_epoch', int(g.assignment_epoch),
    'seen_assignment_epoch', int(arg.assignment_epoch), 'epoch', int(m.epoch), 'seen_epoch', int(arg.epoch) })
  log.wake_all = true
end

-- Somebody who is not in the record, or not under this session, is about to be refused. In a round that makes the exit
-- wait for one lease: this session may have had shards that the record gives to others. It does not open a round, or
-- each zombie that wakes up after one would open another; but what it has seen is written down.
-- Returns: what to add to the refusal.
local function stranger(g, events_key, arg)
  if g.round.open and not g.round.strangers then
    g.round.strangers, g.round.dirty = true, true
    group.save(g)
  end
  if not ahead(g, arg) then return '' end
  events.add(events_key, 'metadata_regression', { 'witness', 'stranger', 'member', arg.member, 'version',
    int(g.version), 'seen_version', int(arg.version), 'assignment_epoch', int(g.assignment_epoch),
    'seen_assignment_epoch', int(arg.assignment_epoch) })
  return '; the metadata went backwards: stored version ' .. int(g.version) .. ', seen ' .. int(arg.version)
end

-- Take what a member says in an open round, once its reports have been applied. `wrong`: a shard that it has in hand
-- and that the record does not give it.
-- Returns: how to answer it.
local function take(g, log, m, arg, owned, wrong)
  -- Only the token counter follows: else what is granted next could be refused by the fences of what they have.
  for _, token in pairs(owned) do g.grant_counter = math.max(g.grant_counter, token) end
  if arg.round ~= g.round.id then return 'SYNC_METADATA' end
  for index, token in pairs(group.parse_held(arg.not_held)) do
    if m.assigned[index] == token or m.revoking[index] == token then
      rebalance.free(g, group.shard(g, index))
      rebalance.changed(log, m)
      rebalance.note(log, 'shard_not_held', { 'shard', int(index), 'member', m.id, 'token', int(token) })
    end
  end
  if wrong then return 'REVOKE_PENDING' end
  for _, held in ipairs({ m.assigned, m.revoking }) do
    for index, token in pairs(held) do
      -- Absence is not an answer.
      if owned[index] ~= token then return 'SYNC_METADATA' end
    end
  end
  round.settle(g.round, m.id)
  return 'REVOKE_PENDING'
end

return { witnessed = witnessed, open = open, stranger = stranger, take = take }
