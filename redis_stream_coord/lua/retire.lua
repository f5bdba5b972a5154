-- A group was deleted: on one shard, its consumer group goes, and a tombstone stays in its fence. It is higher than
-- any claim of that lifecycle, so a member that sleeps through the deletion can neither read nor bring it back.
-- @include clock
-- @include int
-- @include fence
-- @key stream
-- @key fence
-- @arg group string
-- @returns OK, incarnation of the tombstone
local stored = fence.read(key.fence)
if redis.call('EXISTS', key.stream) == 1 then redis.call('XGROUP', 'DESTROY', key.stream, arg.group) end
local incarnation = stored.incarnation
if stored.nonce ~= '-' then incarnation = math.max(incarnation + 1, clock.now_us()) end
redis.call('DEL', key.fence)
redis.call('HSET', key.fence, 'incarnation', int(incarnation), 'token', '0', 'member', '-', 'nonce', '-')
return { 'OK', int(incarnation) }
