-- Close a shard for a routing epoch, and note its cut: the last entry that was routed by an earlier layout. Repeating
-- it gives the same cut; a driver that is late changes nothing.
-- @include refuse
-- @include int
-- @include route
-- @include position
-- @key stream
-- @key route
-- @arg epoch integer
-- @arg held integer   1: entries beyond the cut wait until a group has passed the epoch
-- @arg void integer   the cut of this epoch holds nobody: it was abandoned; 0: none
-- @returns OK, id of the cut
-- @error AHEAD
local now = route.read(key.route)
local order = route.compare(now, arg.epoch, 'closed')
if order > 0 then
  refuse('AHEAD', 'route ' .. int(now.epoch) .. ' ' .. now.state .. ', closing for ' .. int(arg.epoch))
end
if order == 0 then return { 'OK', route.cut_of(now, arg.epoch) or '0-0' } end
local id, kept = position.last_id(key.stream), {}
for _, cut in ipairs(now.cuts) do
  -- A cut of this epoch is there if the route was lost and rebuilt.
  if cut.epoch == arg.epoch and position.less(id, cut.id) then id = cut.id end
  if cut.epoch ~= arg.epoch and cut.epoch ~= arg.void then kept[#kept + 1] = cut end
end
kept[#kept + 1] = { epoch = arg.epoch, id = id, held = arg.held == 1 }
redis.call('HSET', key.route, 'epoch', int(arg.epoch), 'state', 'closed', 'cuts', route.format_cuts(kept))
return { 'OK', id }
