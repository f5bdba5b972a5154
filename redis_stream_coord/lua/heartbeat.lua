-- Join, renew, report, leave; and the housekeeping of the whole group, which any heartbeat does. The script is the
-- critical section: there is no coordinator, and no other mutex.
-- @include clock
-- @include refuse
-- @include int
-- @include events
-- @include group
-- @include round
-- @include leases
-- @include rebalance
-- @include correction
-- @include membership
-- @key metadata
-- @key leases
-- @key events
-- @arg member string
-- @arg nonce string             of the session, drawn at each join
-- @arg epoch integer            0 joins
-- @arg incarnation integer      last seen; 0: none
-- @arg version integer          highest seen in this session
-- @arg assignment_epoch integer highest seen in this session
-- @arg protocol integer
-- @arg weight integer           in thousandths
-- @arg replaces string          nonce of the session that this join replaces, or -
-- @arg leaving integer          1: drain everything and go
-- @arg owned string             shard:token,...  what the member believes to own, or -
-- @arg revoked string           shard:token,...  what it has drained, or -
-- @arg round string           id of the correction round that the member knows of, or -
-- @arg not_held string         shard:token,...  in a round: what the record gives it and it does not have, or -
-- @arg refused list           shard, token, and what refused its claim; see `claim_refused`
-- @returns OK | REVOKE_PENDING | SYNC_METADATA | LEFT, now, incarnation, version, group epoch, assignment epoch, member
--   epoch, heartbeat ms, lease ms, rebalance ms, id of the last event, id of the open correction round or -, 1 if
--   the member has the duty; then, unless unchanged: assigned, revoking, pending
-- @error FENCED_MEMBER_EPOCH
local now = clock.now_ms()
local g = group.open(key.metadata)
group.check_protocol(g, arg.protocol)
membership.check_incarnation(g, arg.incarnation)
-- Asked for now, because a key of the wrong type has to be noticed before anything is written.
local last_event = events.last_id(key.events)
local owned, revoked = group.parse_held(arg.owned), group.parse_held(arg.revoked)
local live, log = leases.look(key.leases, g, now), rebalance.journal()

local me, joined, status
if arg.epoch == 0 then
  me, joined = membership.join(g, log, arg, now)
else
  me = membership.check_session(g, log, live, key.events, arg, now)
end
local wrong = arg.epoch > 0 and membership.not_held(me, owned)
if wrong and not g.round.open then
  events.add(key.events, 'ownership_violation', { 'member', me.id, 'shard', int(wrong), 'token', int(owned[wrong]) })
  refuse('FENCED_MEMBER_EPOCH', 'believes to own shard ' .. int(wrong) .. ' under token ' .. int(owned[wrong]))
end

local duty = 0
local function answer(status, full)
  local reply = { status, int(now), int(g.incarnation), int(g.version), int(g.group_epoch), int(g.assignment_epoch),
    int(me.epoch), int(g.heartbeat_ms), int(g.lease_ms), int(g.rebalance_ms), last_event,
    g.round.open and g.round.id or '-', duty }
  if full then
    for _, list in ipairs({ me.assigned, me.revoking, me.pending }) do reply[#reply + 1] = group.format_list(list) end
  end
  return reply
end

leases.renew(live, g, me.id, now)
local overdue = live.away or live.differs or #live.expired > 0 or now >= g.next_due_ms
if me.weight ~= arg.weight and me.state == 'active' then
  me.weight, me.dirty, g.group_epoch = arg.weight, true, g.group_epoch + 1
end
if arg.leaving == 1 then membership.leave(g, log, me, now) end
for index, token in pairs(revoked) do rebalance.revoked(g, log, me, index, token, now) end
if #arg.refused > 0 then group.complete(g) end
for i = 1, #arg.refused, 3 do
  membership.claim_refused(g, log, me, tonumber(arg.refused[i]), tonumber(arg.refused[i + 1]),
    tonumber(arg.refused[i + 2]), now)
end
if g.round.open and arg.epoch > 0 then status = correction.take(g, log, me, arg, owned, wrong) end
if me.state == 'leaving' and not next(me.assigned) and not next(me.revoking) and not (g.round.open and next(owned)) then
  rebalance.remove(g, log, live, me, 'member_left', now)
end
if overdue or round.over(g.round, g.lease_ms, now) or (g.group_epoch > g.assignment_epoch and not g.round.open) then
  group.complete(g)
  leases.settle(live, g, now)
  rebalance.housekeep(g, log, live, now)
end

local unchanged = arg.epoch == me.epoch and not me.changed and not next(me.revoking) and arg.owned == me.listed
  and arg.round == '-' and not g.round.open
if me.changed and (arg.epoch == me.epoch or joined) and not (g.round.open and status == 'SYNC_METADATA') then
  -- At epoch - 1 the last reply was lost, and a repeated join may be a late copy: one step at a time.
  if not joined then me.epoch = me.epoch + 1 end
  me.changed, me.dirty = false, true
end
group.save(g)
duty = membership.take_duty(g, me, now)
leases.save(live)
log.wake[me.id] = nil
local wake = { log.wake_all and '*' or nil }
for id in pairs(log.wake_all and {} or log.wake) do wake[#wake + 1] = id end
for i, event in ipairs(log.events) do
  events.add(key.events, event.type, event.fields, i == #log.events and wake or nil)
end
if not g.members[me.id] then
  -- Gone by its own wish, or fenced just now because it did not drain in time.
  return me.state == 'leaving' and answer('LEFT', false) or { 'UNKNOWN_MEMBER_ID', 'rebalance timeout' }
end
if g.round.open then return answer(status or 'REVOKE_PENDING', true) end
return answer(next(me.revoking) and 'REVOKE_PENDING' or 'OK', not unchanged)
