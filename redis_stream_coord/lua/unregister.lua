-- A group was deleted: its stream forgets it. The stream and its record stay, they are the producers'.
-- @include int
-- @include layout
-- @key record
-- @arg group string
-- @arg protocol integer
-- @returns OK, 1 if the stream knew it
local record = layout.open(key.record, arg.protocol)
local known = redis.call('HDEL', key.record, 'group:' .. arg.group)
if known == 1 then
  redis.call('HSET', key.record, 'version', int(record.version + 1), 'group_count', int(record.group_count - 1))
end
return { 'OK', known }
