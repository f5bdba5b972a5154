-- Create the record of a group, once all its shards are provisioned: the deciding write of the creation.
-- @include clock
-- @include refuse
-- @include int
-- @include header
-- @include group
-- @include events
-- @include audit
-- @key metadata
-- @key leases
-- @key events
-- @key audit
-- @key limits
-- @key deleted
-- @arg stream string
-- @arg group string
-- @arg incarnation integer   above all that was found in the fences of its shards
-- @arg shards integer
-- @arg epoch integer         of the layout that has so many shards
-- @arg protocol integer
-- @arg heartbeat_ms integer
-- @arg lease_ms integer
-- @arg rebalance_ms integer
-- @arg deleted string         the last deletion, as it was before the shards were provisioned
-- @arg anew integer          1: in place of a record that is lost, damaged or too old
-- @arg request_id string
-- @arg audit list            field, value, ... of the audit entry
-- @returns OK, incarnation
-- @error EXISTS
-- @error DELETED_MEANWHILE
local action = arg.anew == 1 and 'recreate' or 'create'
local before = audit.begin(key.audit, key.limits, action, arg)
if before then return { 'OK', before } end
local found = 0
if arg.anew == 1 then
  local values = redis.pcall('HMGET', key.metadata, 'incarnation')
  found = tonumber(values[1] or '0') or 0
elseif redis.call('EXISTS', key.metadata) == 1 then
  local g = group.open(key.metadata)
  audit.deny(key.audit, action, arg, 'EXISTS', int(g.incarnation))
end
local last = redis.call('HMGET', key.deleted, 'incarnation', 'state')
local deleted = last[1] and last[1] .. ' ' .. (last[2] or '') or '-'
-- A deletion has taken apart what was provisioned, or is about to.
if deleted ~= arg.deleted or string.match(deleted, 'unfinished$') then refuse('DELETED_MEANWHILE', deleted) end
if arg.anew == 1 then redis.call('DEL', key.metadata) end
local incarnation = int(math.max(arg.incarnation, (tonumber(last[1] or '0') or 0) + 1, found + 1, clock.now_us()))
local record = { schema = header.SCHEMA, stream = arg.stream, group = arg.group, duty = 'member=- since_ms=0',
  protocol_min = int(arg.protocol), protocol_max = int(arg.protocol), incarnation = incarnation,
  heartbeat_ms = int(arg.heartbeat_ms), lease_ms = int(arg.lease_ms), rebalance_ms = int(arg.rebalance_ms),
  shard_count = int(arg.shards), version = '1', layout_epoch = int(arg.epoch), layout_step = '2',
  next_due_ms = '9007199254740991', round = '-', frozen = '-' }
for _, name in ipairs(group.NUMBERS) do record[name] = record[name] or '0' end
for name, value in pairs(record) do redis.call('HSET', key.metadata, name, value) end
for index = 0, arg.shards - 1 do
  redis.call('HSET', key.metadata, 'shard:' .. int(index),
    group.format_shard({ token = 0, state = 'free', deadline_ms = 0, hold_until_ms = 0, readable = true }))
end
redis.call('DEL', key.leases)
events.add(key.events, 'group_created', { 'incarnation', incarnation, 'shards', int(arg.shards) })
audit.add(key.audit, action, 'accepted', 'OK', incarnation, arg)
return { 'OK', incarnation }
