-- The whole record of a stream, checked: all that the driver of a resharding decides from. Writes nothing.
-- @include int
-- @include clock
-- @include saga
-- @include layout
-- @key record
-- @arg protocol integer
-- @returns OK, now, the hash as a flat list
local record = layout.open(key.record, arg.protocol)
saga.parse(record)
saga.groups(key.record)
return { 'OK', int(clock.now_ms()), redis.call('HGETALL', key.record) }
