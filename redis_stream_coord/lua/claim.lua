-- Raise the fence of a shard to a granted token, so that from here on no earlier session can read from it,
-- acknowledge on it or release it.
-- @include refuse
-- @include int
-- @include fence
-- @key stream   names the slot; the shard itself is not touched
-- @key fence
-- @arg incarnation integer
-- @arg token integer
-- @arg member string
-- @arg nonce string
-- @returns OK, position
-- @error AHEAD
local stored = fence.read(key.fence)
if stored.incarnation > arg.incarnation then
  refuse('AHEAD', 'fence ' .. int(stored.incarnation) .. ', claim ' .. int(arg.incarnation))
end
local higher = arg.incarnation > stored.incarnation or arg.token > stored.token
if not higher and (arg.token ~= stored.token or arg.nonce ~= stored.nonce) then fence.refuse_for(stored) end
redis.call('HSET', key.fence, 'incarnation', int(arg.incarnation), 'token', int(arg.token), 'member', arg.member,
  'nonce', arg.nonce)
return { 'OK', stored.position }
