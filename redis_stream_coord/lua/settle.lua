-- Forget the cuts of a shard up to an epoch that every group has passed: a fence that is lost later must not bring an
-- old barrier back.
-- @include route
-- @key stream   names the slot; the shard itself is not touched
-- @key route
-- @arg epoch integer
-- @returns OK, number of cuts left
local now, kept = route.read(key.route), {}
for _, cut in ipairs(now.cuts) do
  if cut.epoch > arg.epoch then kept[#kept + 1] = cut end
end
if #kept < #now.cuts then redis.call('HSET', key.route, 'cuts', route.format_cuts(kept)) end
return { 'OK', #kept }
