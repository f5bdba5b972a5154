-- Make one shard ready for a group: stream, consumer group and, while the stream is being created, its open route.
-- Later a missing route is damage and stays missing: a driver that slept must not open it under an old layout.
-- @include refuse
-- @include int
-- @include fence
-- @include route
-- @include position
-- @key stream
-- @key fence
-- @key route
-- @arg group string
-- @arg start string      0 or $: where a new consumer group begins
-- @arg epoch integer
-- @arg layout string
-- @arg creating integer  1: the stream's record says `creating`
-- @arg resharding integer  epoch of the resharding that adds the shard: only before it is closed for that; 0: none
-- @returns OK, incarnation of the fence, 1 if the consumer group is new
-- @error LATE
if arg.resharding > 0 then
  local now = route.read(key.route)
  -- A group that begins at the last id now could miss what is published from here on.
  if route.compare(now, arg.resharding, 'closed') >= 0 then refuse('LATE', int(now.epoch) .. ' ' .. now.state) end
end
local stored = fence.read(key.fence)
-- A consumer group that vanished goes on where it was: at the start everything would come again, at the end of what is
-- there now entries would be lost. So where it begins is noted as well, for the time before its first acknowledgement.
local known = redis.call('HGET', key.fence, 'position')
local begins = known or (arg.start == '$' and position.last_id(key.stream) or '0-0')
local made = redis.pcall('XGROUP', 'CREATE', key.stream, arg.group, begins, 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
if not made.err and not known then redis.call('HSET', key.fence, 'position', begins) end
if arg.creating == 1 and redis.call('EXISTS', key.route) == 0 then
  redis.call('HSET', key.route, 'epoch', int(arg.epoch), 'layout', arg.layout, 'state', 'open')
end
return { 'OK', int(stored.incarnation), made.err and 0 or 1 }
