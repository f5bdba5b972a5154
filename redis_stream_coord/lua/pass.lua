-- A group has consumed all that was before the barrier of an epoch: on this shard it may read beyond it.
-- @include refuse
-- @include int
-- @include fence
-- @key stream   names the slot; the shard itself is not touched
-- @key fence
-- @arg epoch integer
-- @arg incarnation integer   of the group that consumed it: one created anew has yet to
-- @returns OK, 1 if it had not before
-- @error AHEAD
local stored = fence.read(key.fence)
if stored.incarnation > arg.incarnation then
  refuse('AHEAD', 'fence ' .. int(stored.incarnation) .. ', group ' .. int(arg.incarnation))
end
if stored.passed >= arg.epoch then return { 'OK', 0 } end
redis.call('HSET', key.fence, 'passed', int(arg.epoch))
return { 'OK', 1 }
