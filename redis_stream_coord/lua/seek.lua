-- Move a group to another place on one shard. Its owner is fenced, so that what it has read ahead is not handed out
-- after what comes now, and gets a new token at once. What was pending is forgotten: it comes again, or is skipped.
-- A driver that slept past a deletion meets its tombstone, or the fence of a later lifecycle, and moves nothing.
-- @include refuse
-- @include int
-- @include fence
-- @key stream
-- @key fence
-- @arg group string
-- @arg incarnation integer   of the lifecycle that is meant
-- @arg id string   the next entry is the first one beyond it; $: beyond the last one
-- @returns OK, id
-- @error GROUP_NOT_FOUND
-- @error STREAM_MISSING
local stored = fence.read(key.fence)
if stored.incarnation > arg.incarnation then
  refuse('GROUP_NOT_FOUND', 'incarnation ' .. int(stored.incarnation) .. ' was here, meant is ' .. int(arg.incarnation))
end
if redis.call('EXISTS', key.stream) == 0 then refuse('STREAM_MISSING', key.stream) end
local id = arg.id
if id == '$' then
  local newest = redis.call('XREVRANGE', key.stream, '+', '-', 'COUNT', 1)[1]
  id = newest and newest[1] or '0-0'
end
redis.call('XGROUP', 'DESTROY', key.stream, arg.group)
redis.call('XGROUP', 'CREATE', key.stream, arg.group, id)
redis.call('HSET', key.fence, 'incarnation', int(stored.incarnation), 'token', int(stored.token), 'member', '-',
  'nonce', 'sought', 'position', id)
return { 'OK', id }
