-- A group was deleted: its stream forgets it. The stream and its record stay, they are the producers'. Only the
-- registration goes that the driver of the deletion has seen: one that slept leaves alone what was made since.
-- @include int
-- @include layout
-- @include saga
-- @key record
-- @arg group string
-- @arg registered integer    its registration, as the driver read it
-- @arg protocol integer
-- @returns OK, 1 if the stream knew it
local record = layout.open(key.record, arg.protocol)
local g = saga.groups(key.record)[arg.group]
if not g or g.registered ~= arg.registered then return { 'OK', 0 } end
redis.call('HDEL', key.record, 'group:' .. arg.group)
redis.call('HSET', key.record, 'version', int(record.version + 1), 'group_count', int(record.group_count - 1))
return { 'OK', 1 }
