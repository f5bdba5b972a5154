-- The fence of one shard for one group: the session that may read and acknowledge it.
-- @include refuse
-- @include int
-- @error CORRUPT_METADATA
-- @error FENCED

-- Returns: { incarnation, token, member, nonce, position, passed }; zeros and '' if it was lost or never
--   written, which is lower than any claim.
local function read(key)
  local values = redis.pcall('HMGET', key, 'incarnation', 'token', 'member', 'nonce', 'position', 'passed')
  if values.err then refuse('CORRUPT_METADATA', key .. ' is not a hash') end
  local incarnation, token, passed = values[1] or '0', values[2] or '0', values[6] or '0'
  if not string.match(incarnation .. ' ' .. token .. ' ' .. passed, '^%d+ %d+ %d+$') then
    refuse('CORRUPT_METADATA', key)
  end
  return { incarnation = tonumber(incarnation), token = tonumber(token), member = values[3] or '',
    nonce = values[4] or '', position = values[5] or '0-0', passed = tonumber(passed) }
end

local function refuse_for(fence)
  refuse('FENCED', int(fence.incarnation), int(fence.token), fence.member)
end

-- Let exactly the session pass that claimed the shard. A zombie reads nothing and acknowledges nothing.
local function check(key, arg)
  local fence = read(key)
  if fence.incarnation ~= arg.incarnation or fence.token ~= arg.token or fence.nonce ~= arg.nonce then
    refuse_for(fence)
  end
  return fence
end

return { read = read, check = check, refuse_for = refuse_for }
