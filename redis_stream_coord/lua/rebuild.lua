-- Make a route that is not there: that of a shard which is added, or one that was lost. Always closed; whoever made it
-- reads the stream's record again before it opens anything. What was read too long ago makes nothing.
-- @include refuse
-- @include int
-- @include clock
-- @include route
-- @key stream   names the slot; the shard itself is not touched
-- @key route
-- @arg epoch integer    of the record
-- @arg cuts string      of this shard, as the record has them
-- @arg read_ms integer  when the record was read, Redis server time
-- @returns OK, 1 if it was made
-- @error STALE_RECORD
if route.find(key.route) then return { 'OK', 0 } end
local age_ms = clock.now_ms() - arg.read_ms
if age_ms > 30000 then refuse('STALE_RECORD', 'read ' .. int(age_ms) .. ' ms ago') end
local cuts = route.format_cuts(route.parse_cuts(arg.cuts, key.route))
redis.call('HSET', key.route, 'epoch', int(arg.epoch), 'layout', '-', 'state', 'closed', 'cuts', cuts)
return { 'OK', 1 }
