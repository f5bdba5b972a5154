-- Move a group to another place on one shard. Its owner is fenced, so that what it has read ahead is not handed out
-- after what comes now, and gets a new token at once. What was pending is forgotten: it comes again, or is skipped.
-- @include refuse
-- @include int
-- @include fence
-- @key stream
-- @key fence
-- @arg group string
-- @arg id string   the next entry is the first one beyond it; $: beyond the last one
-- @returns OK, id
-- @error STREAM_MISSING
local stored = fence.read(key.fence)
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
