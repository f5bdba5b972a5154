-- Take a resharding back. Before its decision it is abandoned. After it, it goes back by the same way, under a fresh
-- epoch and with cuts of its own, so that nothing is lost and order holds. Asked again, it changes nothing.
-- @include int
-- @include layout
-- @include saga
-- @include audit
-- @key record
-- @key audit
-- @key limits
-- @arg protocol integer
-- @arg saga string
-- @arg request_id string
-- @arg audit list   field, value, ... of the audit entry
-- @returns OK, id of the resharding
-- @error NOT_RESHARDING
local before = audit.begin(key.audit, key.limits, 'rollback', arg)
if before then return { 'OK', before } end
local record = layout.open(key.record, arg.protocol)
local s = saga.parse(record)
if not s or s.id ~= arg.saga or not s.active then
  audit.deny(key.audit, 'rollback', arg, 'NOT_RESHARDING', s and s.id == arg.saga and s.state or 'no such resharding')
end
if not s.back and (s.state == 'PREPARING' or s.state == 'CUTOVER') then
  saga.abandon(key.record, record, s, 'rolled back')
elseif not s.back and s.state == 'DRAINING' then
  s.state, s.back, s.epoch, s.from, s.to, s.reason = 'PREPARING', true, saga.draw(record), s.to, s.from, 'rolled back'
  saga.save(key.record, record, s, 'drawn', int(s.epoch))
end
audit.add(key.audit, 'rollback', 'accepted', 'OK', s.id, arg)
return { 'OK', s.id }
