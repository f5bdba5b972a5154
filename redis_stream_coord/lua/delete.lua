-- Delete the record of a group: the deciding write of the deletion. Its members stop reading when they hear of it,
-- and cannot read any more once its shards are retired.
-- @include clock
-- @include refuse
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
  local g, now, live = group.open(key.metadata), clock.now_ms(), {}
  group.complete(g)
  for id in pairs(g.members) do
    -- Whose lease was lost may be alive: the next heartbeat of anybody gives it a full one.
    local deadline = redis.call('ZSCORE', key.leases, id)
    if not deadline or tonumber(deadline) > now then live[#live + 1] = id end
  end
  if #live > 0 then
    table.sort(live)
    local names = table.concat(live, ' ', 1, math.min(#live, 10))
    audit.add(key.audit, 'delete', 'refused', 'NOT_EMPTY', names, arg)
    refuse('NOT_EMPTY', names)
  end
end
redis.call('DEL', key.metadata, key.leases)
events.add(key.events, 'group_deleted', {}, { '*' })
audit.add(key.audit, 'delete', 'accepted', 'OK', '1', arg)
return { 'OK', '1' }
