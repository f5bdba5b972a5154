-- Acknowledge entries under the fence of their shard, and record how far the group got.
-- @include fence
-- @include position
-- @key stream
-- @key fence
-- @arg group string
-- @arg incarnation integer
-- @arg token integer
-- @arg nonce string
-- @arg delete integer   1: delete those that no group of the stream needs any more
-- @arg ids list
-- @returns OK, how many were pending until now, position
fence.check(key.fence, arg)
local count = redis.call('XACK', key.stream, arg.group, unpack(arg.ids))
-- A group or stream that vanished leaves the recorded position as it is.
local known = redis.call('EXISTS', key.stream) == 1 and position.last_delivered(key.stream, arg.group)
local now = known and position.of(key.stream, arg.group) or ''
if known then redis.call('HSET', key.fence, 'position', now) end
if known and arg.delete == 1 then
  for _, id in ipairs(arg.ids) do
    if not position.needs(key.stream, id) then redis.call('XDEL', key.stream, id) end
  end
end
return { 'OK', count, now }
