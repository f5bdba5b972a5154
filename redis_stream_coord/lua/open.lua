-- Open a shard that is closed for this routing epoch, and for no other. Skipping the close would leave entries of the
-- earlier layout beyond the recorded cut.
-- @include refuse
-- @include int
-- @include route
-- @key stream   names the slot; the shard itself is not touched
-- @key route
-- @arg epoch integer
-- @arg layout string
-- @returns OK
-- @error AHEAD
-- @error NOT_CLOSED
local now = route.read(key.route)
local order = route.compare(now, arg.epoch, 'open')
if order > 0 then
  refuse('AHEAD', 'route ' .. int(now.epoch) .. ' ' .. now.state .. ', opening at ' .. int(arg.epoch))
end
if order == 0 then return { 'OK' } end
if now.epoch ~= arg.epoch then
  refuse('NOT_CLOSED', 'route ' .. int(now.epoch) .. ' ' .. now.state .. ', opening at ' .. int(arg.epoch))
end
redis.call('HSET', key.route, 'state', 'open', 'layout', arg.layout)
return { 'OK' }
