-- What the delivery counts of a shard's pending entries say. Redis has for each the number of the delivery that comes
-- next; nothing is written for one that is under way where the owner hands out one entry after another.
-- @include int

-- Was the first pending entry in a handler, though its count does not say so? Whoever takes over under another token
-- has to presume it, unless the owner before wrote each delivery down, or drained. What was only read ahead was not
-- delivered. The same token is the same process again, which knows better.
local function presumed(fence, token)
  local counts = redis.call('HGET', fence, 'counts') or ''
  return string.sub(counts, 1, 5) ~= 'each:' and counts ~= 'first:' .. int(token)
end

-- Note for the next owner whether this one writes each delivery down.
local function mark(fence, token, each)
  local mine = (each and 'each:' or 'first:') .. int(token)
  if redis.call('HGET', fence, 'counts') ~= mine then redis.call('HSET', fence, 'counts', mine) end
end

return { presumed = presumed, mark = mark }
