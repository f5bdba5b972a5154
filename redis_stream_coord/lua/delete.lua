-- Delete the record of a group: the deciding write of the deletion. Its members stop reading when they hear of it,
-- and cannot read any more once its shards are retired.
-- @include clock
-- @include refuse
-- @include int
-- @include group
-- @include events
-- @include audit
-- @key metadata
-- @key leases
-- @key events
-- @key audit
-- @arg force integer      1: even with live members or damaged metadata
-- @arg request_id string
-- @arg audit list         field, value, ... of the audit entry
-- @returns OK, 1 if it was there
-- @error NOT_EMPTY
-- @error GROUP_NOT_FOUND
local before = audit.find(key.audit, 'delete', arg.request_id)
if before and before['outcome'] == 'accepted' then return { 'OK', before['detail'] } end
if redis.call('EXISTS', key.metadata) == 0 then
  audit.add(key.audit, 'delete', 'refused', 'GROUP_NOT_FOUND', '', arg)
  refuse('GROUP_NOT_FOUND')
end
if arg.force == 0 then
  group.complete(group.open(key.metadata))
  local live = redis.call('ZRANGEBYSCORE', key.leases, '(' .. int(clock.now_ms()), '+inf', 'LIMIT', 0, 10)
  if #live > 0 then
    audit.add(key.audit, 'delete', 'refused', 'NOT_EMPTY', table.concat(live, ' '), arg)
    refuse('NOT_EMPTY', table.concat(live, ' '))
  end
end
redis.call('DEL', key.metadata, key.leases)
events.add(key.events, 'group_deleted', {}, { '*' })
audit.add(key.audit, 'delete', 'accepted', 'OK', '1', arg)
return { 'OK', '1' }
