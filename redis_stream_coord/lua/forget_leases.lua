-- Forget all leases of a group: its members get a full one each with the next heartbeat of anybody.
-- @include audit
-- @include group
-- @key metadata
-- @key leases
-- @key audit
-- @key limits
-- @arg request_id string
-- @arg audit list   field, value, ... of the audit entry
-- @returns OK
if not audit.begin(key.audit, key.limits, 'repair', arg) then
  group.open(key.metadata)
  redis.call('DEL', key.leases)
  audit.add(key.audit, 'repair', 'accepted', 'OK', 'leases', arg)
end
return { 'OK' }
