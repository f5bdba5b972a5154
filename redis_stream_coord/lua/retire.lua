-- A group was deleted: on one shard, its consumer group goes, and a tombstone stays in its fence. It is higher than
-- any claim of that lifecycle, so a member that sleeps through the deletion can neither read nor bring it back. A
-- driver of the deletion that slept meets the tombstone, or the fence of a later lifecycle, and changes nothing.
-- @include int
-- @include fence
-- @key stream
-- @key fence
-- @arg group string
-- @arg incarnation integer   of the lifecycle that was deleted
-- @returns OK, incarnation of the tombstone, 1 if it was made now
local stored = fence.read(key.fence)
if stored.incarnation > arg.incarnation then return { 'OK', int(stored.incarnation), 0 } end
if redis.call('EXISTS', key.stream) == 1 then redis.call('XGROUP', 'DESTROY', key.stream, arg.group) end
local incarnation = int(arg.incarnation + 1)
redis.call('DEL', key.fence)
redis.call('HSET', key.fence, 'incarnation', incarnation, 'token', '0', 'member', '-', 'nonce', '-')
return { 'OK', incarnation, 1 }
