-- Delete the record of a group: the deciding write of the deletion. Its members stop reading when they hear of it,
-- and cannot read any more once its shards are retired.
-- @include clock
-- @include int
-- @include group
-- @include events
-- @include audit
-- @key metadata
-- @key leases
-- @key events
-- @key audit
-- @key limits
-- @key deleted
-- @arg force integer      0; 1: even with live members or damaged metadata; 2: even if frozen
-- @arg request_id string
-- @arg audit list         field, value, ... of the audit entry
-- @returns OK, incarnation that was deleted
-- @error FROZEN
-- @error NOT_EMPTY
-- @error GROUP_NOT_FOUND
local before = audit.begin(key.audit, key.limits, 'delete', arg)
if before then return { 'OK', before } end
local last = redis.call('HMGET', key.deleted, 'incarnation', 'state')
local deleted = last[2] == 'unfinished' and last[1]
if redis.call('EXISTS', key.metadata) == 0 then
  if not deleted then audit.deny(key.audit, 'delete', arg, 'GROUP_NOT_FOUND', '') end
  -- Somebody else's deletion was decided and not finished: this one finishes it.
  audit.add(key.audit, 'delete', 'accepted', 'OK', deleted, arg)
  return { 'OK', deleted }
end
local incarnation, frozen = nil, nil
if arg.force == 0 then
  local g, now, live = group.open(key.metadata), clock.now_ms(), {}
  group.complete(g)
  incarnation, frozen = g.incarnation, g.frozen
  for id in pairs(g.members) do
    -- Whose lease was lost may be alive: the next heartbeat of anybody gives it a full one.
    local deadline = redis.call('ZSCORE', key.leases, id)
    if not deadline or tonumber(deadline) > now then live[#live + 1] = id end
  end
  if #live > 0 and not frozen then
    table.sort(live)
    audit.deny(key.audit, 'delete', arg, 'NOT_EMPTY', table.concat(live, ' ', 1, math.min(#live, 10)))
  end
else
  -- Whatever the key has become.
  local values = redis.pcall('HMGET', key.metadata, 'incarnation', 'frozen')
  incarnation = tonumber(string.match(values[1] or '', '^%d+$')) or clock.now_us()
  frozen = arg.force == 1 and tonumber(values[2] or '')
end
if frozen then audit.deny(key.audit, 'delete', arg, 'FROZEN', int(frozen)) end
redis.call('HSET', key.deleted, 'incarnation', int(incarnation), 'state', 'unfinished')
redis.call('DEL', key.metadata, key.leases)
events.add(key.events, 'group_deleted', {}, { '*' })
audit.add(key.audit, 'delete', 'accepted', 'OK', int(incarnation), arg)
return { 'OK', int(incarnation) }
