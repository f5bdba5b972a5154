-- Trim a shard, no further than every group of the stream has acknowledged. Done by the owner of the shard.
-- @include fence
-- @include position
-- @include retention
-- @key stream
-- @key fence
-- @arg incarnation integer
-- @arg token integer
-- @arg nonce string
-- @arg keep integer   so many entries stay, roughly, though all groups have finished them; 0: none
-- @arg groups list    names of the registered groups
-- @returns OK, how many entries went, name of the group that has to be there first or ''
fence.check(key.fence, arg)
if redis.call('EXISTS', key.stream) == 0 then return { 'OK', 0, '' } end
for _, group in ipairs(arg.groups) do
  -- A consumer group that vanished has a position all the same; nothing beyond it may go before it is back.
  if not position.last_delivered(key.stream, group) then return { 'OK', 0, group } end
end
local needed = position.needed_from(key.stream)
return { 'OK', retention.trim(key.stream, needed, arg.keep), '' }
