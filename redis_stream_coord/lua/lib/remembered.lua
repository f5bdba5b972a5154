-- The event ids that a shard remembers, so that none is published twice: a ring. `e:<event id>` -> entry id, `r:<n>` ->
-- event id, with n from tail to head.
-- @include int

local function open(key)
  local ends = redis.call('HMGET', key, 'tail', 'head')
  return { tail = tonumber(ends[1] or '1'), head = tonumber(ends[2] or '0') }
end

local function add(key, ring, event_id, id)
  ring.head = ring.head + 1
  redis.call('HSET', key, 'e:' .. event_id, id, 'r:' .. int(ring.head), event_id)
end

-- Forget the oldest ids, as far as they are out of the window.
-- Parameters: key; ring; last: number of the last one that may go; most: so many at most; now in ms; arg: of the
--   script, with `window_ms` and `window_count`. Returns: how many.
local function forget(key, ring, last, most, now_ms, arg)
  local first = ring.tail
  while ring.tail <= last and ring.tail - first < most do
    local oldest = redis.call('HGET', key, 'r:' .. int(ring.tail))
    if not oldest then break end
    local kept = redis.call('HGET', key, 'e:' .. oldest)
    local age_ms = now_ms - tonumber(string.match(kept or '0', '^%d+'))
    if ring.head - ring.tail < arg.window_count and age_ms <= arg.window_ms then break end
    redis.call('HDEL', key, 'e:' .. oldest, 'r:' .. int(ring.tail))
    ring.tail = ring.tail + 1
  end
  return ring.tail - first
end

local function close(key, ring)
  redis.call('HSET', key, 'tail', int(ring.tail), 'head', int(ring.head))
end

return { open = open, add = add, forget = forget, close = close }
