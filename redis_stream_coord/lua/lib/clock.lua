-- The Redis server's clock: the only one that decides about leases and deadlines.
local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

return { now_us = now_us, now_ms = now_ms }
