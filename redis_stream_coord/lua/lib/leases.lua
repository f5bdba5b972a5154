-- Who is alive: a sorted set member -> deadline in Redis server ms. Read at once, written once at the end, so that
-- a refusal in between has changed nothing.
-- @include int

-- Look at the leases, before the caller renews its own.
-- Parameters: key; g: the group; now: ms.
-- Returns: table with `expired` (ids whose deadline passed), `away` (nobody renewed for half a lease: Redis was
--   not there, so nobody's silence counts) and `differs` (the set was lost or damaged).
local function look(key, g, now)
  local expired = redis.call('ZRANGEBYSCORE', key, '-inf', int(now))
  local newest = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  local away = newest[2] and tonumber(newest[2]) < now + g.lease_ms / 2
  return { key = key, expired = expired, away = away, differs = redis.call('ZCARD', key) ~= g.member_count,
    set = {}, gone = {} }
end

-- Put right what `look` found: a member without a lease, and everybody after Redis was away, gets one full lease
-- before anybody is expired; leases without a member go. Needs the complete group.
local function settle(leases, g, now)
  -- A lease of nobody makes up for a missing one in the count.
  for _, id in ipairs(leases.expired) do leases.differs = leases.differs or not g.members[id] end
  if not leases.away and not leases.differs then return end
  for id, m in pairs(g.members) do
    if m and (leases.away or not redis.call('ZSCORE', leases.key, id)) then leases.set[id] = now + g.lease_ms end
  end
  for _, id in ipairs(redis.call('ZRANGE', leases.key, 0, -1)) do
    if not g.members[id] then leases.gone[#leases.gone + 1] = id end
  end
end

local function renew(leases, g, id, now)
  leases.set[id] = now + g.lease_ms
end

local function drop(leases, id)
  leases.set[id] = nil
  leases.gone[#leases.gone + 1] = id
end

local function save(leases)
  for _, id in ipairs(leases.gone) do redis.call('ZREM', leases.key, id) end
  for id, deadline in pairs(leases.set) do redis.call('ZADD', leases.key, int(deadline), id) end
end

return { look = look, settle = settle, renew = renew, drop = drop, save = save }
