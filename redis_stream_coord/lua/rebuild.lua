-- Make a route that is not there: that of a shard which is added, or one that was lost. Always closed; whoever made it
-- reads the stream's record again before it opens anything. What was read too long ago makes nothing: neither what is
-- very old, nor what was read before the last entry came. The shard was open then, perhaps for a layout that the record
-- did not have yet, with cuts that hold what lies beyond them.
-- @include refuse
-- @include int
-- @include clock
-- @include route
-- @include position
-- @key stream   names the slot; the shard itself is not touched
-- @key route
-- @arg epoch integer    of the record
-- @arg cuts string      of this shard, as the record has them
-- @arg read_ms integer  when the record was read, Redis server time
-- @returns OK, 1 if it was made
-- @error STALE_RECORD
if route.find(key.route) then return { 'OK', 0 } end
local now, last = clock.now_ms(), position.last_id(key.stream)
local age_ms, last_ms = now - arg.read_ms, tonumber(string.match(last, '^%d+'))
if age_ms > 30000 then refuse('STALE_RECORD', 'read ' .. int(age_ms) .. ' ms ago') end
-- An id ahead of the clock says nothing of when it came.
if last_ms > arg.read_ms and last_ms <= now then refuse('STALE_RECORD', 'read before ' .. last .. ' came') end
local cuts = route.format_cuts(route.parse_cuts(arg.cuts, key.route))
redis.call('HSET', key.route, 'epoch', int(arg.epoch), 'layout', '-', 'state', 'closed', 'cuts', cuts)
return { 'OK', 1 }
