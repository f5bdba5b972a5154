-- Append entries to a shard, if the producer routed them by the shard's present layout, and each event id once.
-- The id is looked up before the route: a retry after a lost reply finds its entry even where the shard has been
-- closed since.
-- A refusal says the phase of the route, which only moves up: beyond the producer's layout nothing that was routed by
-- that layout can land here any more, and only then may the producer send the entry elsewhere.
-- @include clock
-- @include remembered
-- @key stream
-- @key route
-- @key published
-- @arg layout string          the layout that the producer routed by
-- @arg window_ms integer      how long event ids are remembered
-- @arg window_count integer   how many of them at most
-- @arg entries list           of each entry: event id or '', number of values, field, value, ...
-- @returns OK, then of each entry: OK | DUPLICATE, id; or an error word, detail
-- @error ROUTE_MISSING
-- @error STALE_ROUTE
-- @error CLOSED
-- @error STREAM_MISSING

-- A command that remembering an event id needs and the caller's user may not give, as far as Redis can say (7.0), or
-- nil. Asked before anything is appended: Redis takes nothing back, and a producer that is told it failed publishes
-- again.
local function lacking()
  local may, at = redis.acl_check_cmd, 1
  while at <= #arg.entries and arg.entries[at] == '' do at = at + 2 + tonumber(arg.entries[at + 1]) end
  for _, command in ipairs(may and at <= #arg.entries and { 'hset', 'hdel' } or {}) do
    if not may(command, key.published) then return command end
  end
end

local lack = lacking()
if lack then return redis.error_reply("NOPERM this user has no permissions to run the '" .. lack .. "' command") end
local route = redis.call('HMGET', key.route, 'layout', 'state', 'epoch')
local ring, now

local function refusal()
  if not route[2] or not route[3] then return 'ROUTE_MISSING', key.route end
  local word = route[2] ~= 'open' and 'CLOSED' or route[1] ~= arg.layout and 'STALE_ROUTE' or nil
  return word, word and route[3] .. ' ' .. (route[1] or '-')
end

local function remember(event_id, id)
  ring, now = ring or remembered.open(key.published), now or clock.now_ms()
  remembered.add(key.published, ring, event_id, id)
  -- Two at most for each that comes in: bounded work, and the window still shrinks.
  remembered.forget(key.published, ring, ring.head - 1, 2, now, arg)
end

local reply, at = { 'OK' }, 1
local word, detail = refusal()
while at <= #arg.entries do
  local event_id, count = arg.entries[at], tonumber(arg.entries[at + 1])
  local known = event_id ~= '' and redis.call('HGET', key.published, 'e:' .. event_id)
  local outcome, id = word, detail
  if known then
    outcome, id = 'DUPLICATE', known
  elseif not word then
    id = redis.call('XADD', key.stream, 'NOMKSTREAM', '*', unpack(arg.entries, at + 2, at + 1 + count))
    outcome = id and 'OK' or 'STREAM_MISSING'
    if id and event_id ~= '' then remember(event_id, id) end
  end
  reply[#reply + 1] = outcome
  reply[#reply + 1] = id or key.stream
  at = at + 2 + count
end
if ring then remembered.close(key.published, ring) end
return reply
