-- Trim a shard that the layout has no more, so that nobody owns it: entries no further than every consumer group there
-- has finished them, event ids as far as no producer asks for them any more. The stream stays, and with it its last id;
-- so do fences and the route. A copy of this that comes when the shard is back meets the route of a later epoch.
-- @include refuse
-- @include int
-- @include clock
-- @include route
-- @include position
-- @include retention
-- @include remembered
-- @key stream
-- @key route
-- @key published
-- @arg epoch integer          of the layout that does not have the shard
-- @arg keep integer           so many entries stay, roughly, though all groups have finished them; 0: none
-- @arg window_ms integer      how long event ids are remembered
-- @arg window_count integer   how many of them at most
-- @arg most integer           so many event ids go in one call
-- @arg groups list            of each registered group: name, epoch of the layout that it was created for
-- @returns OK, how many entries went, how many event ids, name of the group that has to be there first or ''
-- @error AHEAD
-- @error NOT_CLOSED
local there, absent = redis.call('XLEN', key.stream) > 0, ''
-- A resharding was given up before it had made the shard, or its consumer groups there.
if not there and not route.find(key.route) then return { 'OK', 0, 0, '' } end
local now = route.read(key.route)
local phase = 'route ' .. int(now.epoch) .. ' ' .. now.state .. ', trimming under layout ' .. int(arg.epoch)
if now.epoch > arg.epoch then refuse('AHEAD', phase) end
if now.state ~= 'closed' then refuse('NOT_CLOSED', phase) end
for i = 1, there and #arg.groups or 0, 2 do
  -- One that was created when the shard had gone never had a place here. Any other has one, though its consumer group
  -- has vanished, and goes on there if the shard comes back.
  local was_there = tonumber(arg.groups[i + 1]) < now.epoch
  if was_there and not position.last_delivered(key.stream, arg.groups[i]) then absent = arg.groups[i] end
end
-- A group that comes later begins at the last id, so without any group nobody needs anything.
local needed = there and absent == '' and (position.needed_from(key.stream) or position.last_id(key.stream))
local ring = remembered.open(key.published)
local ids = remembered.forget(key.published, ring, ring.head, arg.most, clock.now_ms(), arg)
if ids > 0 then remembered.close(key.published, ring) end
return { 'OK', needed and retention.trim(key.stream, needed, arg.keep) or 0, ids, absent }
