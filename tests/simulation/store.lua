-- A small Redis for the simulation: what the scripts of the library use, and nothing more, inside the Lua that runs them.
-- Every write goes through `put`, which remembers what was there: any number of the latest calls can be taken back.
-- Returns a table of functions for store.py. Part 1 of 2: keys, hashes, sets, sorted sets; streams.lua has the streams.
local db = {}        -- key -> value: a table with `type`
local log, top = {}, 0   -- table, key, old value of every write, in threes
local calls = {}     -- of every call: where its writes begin in `log`, and the slot it worked on (false: taken back)
local env = {}       -- what the scripts see
local owner = {}     -- table of a hash, a set or a sorted set -> its key
local now_us = 0

local function put(t, k, v)
  log[top + 1], log[top + 2], log[top + 3] = t, k, t[k]
  top = top + 3
  t[k] = v
end

local function fail(message)
  error({ err = message }, 0)
end

-- As Redis does with the numbers that a script hands to a command.
local function str(value)
  if type(value) == 'number' then return string.format('%.17g', value) end
  return value
end

local function get(key, type)
  local value = db[key]
  if value and value.type ~= type then fail('WRONGTYPE Operation against a key holding the wrong kind of value') end
  return value
end

local function make(key, type)
  local value = { type = type, map = {}, n = 0 }
  owner[value.map] = key
  put(db, key, value)
  return value
end

local commands = {}

function commands.TIME()
  return { string.format('%.0f', math.floor(now_us / 1000000)), string.format('%.0f', now_us % 1000000) }
end

function commands.EXISTS(...)
  local count = 0
  for i = 1, select('#', ...) do
    if db[(select(i, ...))] then count = count + 1 end
  end
  return count
end

function commands.DEL(...)
  local count = 0
  for i = 1, select('#', ...) do
    local key = select(i, ...)
    if db[key] then
      put(db, key, nil)
      count = count + 1
    end
  end
  return count
end

-- --- hashes ----------------------------------------------------------------------------------------------------------

local function make_hash(key)
  local value = get(key, 'hash')
  if value then return value end
  return make(key, 'hash')
end

local function set_field(hash, field, value)
  field = str(field)
  local old = hash.map[field]
  if not old then put(hash, 'n', hash.n + 1) end
  put(hash.map, field, str(value))
  return not old
end

function commands.HSET(key, ...)
  local hash, count = make_hash(key), 0
  local pairs_given = { ... }
  for i = 1, #pairs_given, 2 do
    if set_field(hash, pairs_given[i], pairs_given[i + 1]) then count = count + 1 end
  end
  return count
end

function commands.HSETNX(key, field, value)
  local hash = make_hash(key)
  if hash.map[str(field)] then return 0 end
  set_field(hash, field, value)
  return 1
end

function commands.HGET(key, field)
  local hash = get(key, 'hash')
  return hash and hash.map[str(field)] or false
end

function commands.HMGET(key, ...)
  local hash, found = get(key, 'hash'), { ... }
  local map = hash and hash.map or {}
  for i = 1, #found do found[i] = map[str(found[i])] or false end
  return found
end

function commands.HEXISTS(key, field)
  local hash = get(key, 'hash')
  return hash and hash.map[str(field)] and 1 or 0
end

function commands.HDEL(key, ...)
  local hash, count = get(key, 'hash'), 0
  for _, field in ipairs(hash and { ... } or {}) do
    field = str(field)
    if hash.map[field] then
      put(hash.map, field, nil)
      put(hash, 'n', hash.n - 1)
      count = count + 1
    end
  end
  if hash and hash.n == 0 then put(db, key, nil) end
  return count
end

function commands.HLEN(key)
  local hash = get(key, 'hash')
  return hash and hash.n or 0
end

local function hash_lines(key, with_fields, with_values)
  local hash, out, n = get(key, 'hash'), {}, 0
  for field, value in pairs(hash and hash.map or {}) do
    if with_fields then
      n = n + 1
      out[n] = field
    end
    if with_values then
      n = n + 1
      out[n] = value
    end
  end
  return out
end

function commands.HGETALL(key) return hash_lines(key, true, true) end

function commands.HKEYS(key) return hash_lines(key, true, false) end

function commands.HVALS(key) return hash_lines(key, false, true) end

function commands.HINCRBY(key, field, by)
  local value = tonumber(commands.HGET(key, field) or '0') + tonumber(by)
  set_field(make_hash(key), field, string.format('%.0f', value))
  return value
end

-- --- sets ------------------------------------------------------------------------------------------------------------

-- A set is a hash whose values say nothing.
function commands.SADD(key, ...)
  local set, count = get(key, 'set'), 0
  set = set or make(key, 'set')
  for _, member in ipairs({ ... }) do
    if set_field(set, member, '1') then count = count + 1 end
  end
  return count
end

function commands.SREM(key, ...)
  local set, count = get(key, 'set'), 0
  for _, member in ipairs(set and { ... } or {}) do
    if set.map[str(member)] then
      put(set.map, str(member), nil)
      put(set, 'n', set.n - 1)
      count = count + 1
    end
  end
  if set and set.n == 0 then put(db, key, nil) end
  return count
end

function commands.SMEMBERS(key)
  local set, out = get(key, 'set'), {}
  for member in pairs(set and set.map or {}) do out[#out + 1] = member end
  return out
end

function commands.SISMEMBER(key, member)
  local set = get(key, 'set')
  return set and set.map[str(member)] and 1 or 0
end

-- --- sorted sets -----------------------------------------------------------------------------------------------------

function commands.ZADD(key, ...)
  local zset, count, given = get(key, 'zset'), 0, { ... }
  zset = zset or make(key, 'zset')
  for i = 1, #given, 2 do
    local member = str(given[i + 1])
    if not zset.map[member] then
      put(zset, 'n', zset.n + 1)
      count = count + 1
    end
    put(zset.map, member, tonumber(given[i]) or fail('ERR value is not a valid float'))
  end
  return count
end

function commands.ZREM(key, ...)
  local zset, count = get(key, 'zset'), 0
  for _, member in ipairs(zset and { ... } or {}) do
    if zset.map[str(member)] then
      put(zset.map, str(member), nil)
      put(zset, 'n', zset.n - 1)
      count = count + 1
    end
  end
  if zset and zset.n == 0 then put(db, key, nil) end
  return count
end

function commands.ZSCORE(key, member)
  local zset = get(key, 'zset')
  local score = zset and zset.map[str(member)]
  return score and str(score) or false
end

function commands.ZCARD(key)
  local zset = get(key, 'zset')
  return zset and zset.n or 0
end

local function ranked(key)
  local zset, out = get(key, 'zset'), {}
  if not zset then return out, {} end
  local map = zset.map
  for member in pairs(map) do out[#out + 1] = member end
  table.sort(out, function(a, b)
    if map[a] ~= map[b] then return map[a] < map[b] end
    return a < b
  end)
  return out, map
end

local function slice(members, map, first, last, scores)
  first, last = tonumber(first), tonumber(last)
  if first < 0 then first = math.max(#members + first, 0) end
  if last < 0 then last = #members + last end
  local out = {}
  for i = first + 1, math.min(last + 1, #members) do
    out[#out + 1] = members[i]
    if scores then out[#out + 1] = str(map[members[i]]) end
  end
  return out
end

function commands.ZRANGE(key, first, last, scores)
  local members, map = ranked(key)
  return slice(members, map, first, last, scores)
end

function commands.ZREVRANGE(key, first, last, scores)
  local members, map = ranked(key)
  local back = {}
  for i = #members, 1, -1 do back[#back + 1] = members[i] end
  return slice(back, map, first, last, scores)
end

local function bound(text)
  if text == '-inf' then return -math.huge end
  if text == '+inf' then return math.huge end
  return tonumber(text) or fail('ERR min or max is not a float')
end

function commands.ZRANGEBYSCORE(key, low, high)
  local members, map = ranked(key)
  local out, from, to = {}, bound(low), bound(high)
  for _, member in ipairs(members) do
    if map[member] >= from and map[member] <= to then out[#out + 1] = member end
  end
  return out
end

-- --- scripts ---------------------------------------------------------------------------------------------------------

local function call(name, ...)
  local command = commands[name] or fail("ERR unknown command '" .. tostring(name) .. "'")
  return command(...)
end

-- No more globals than every supported server offers; any other one, read or written, is an error there and here.
local words = [[assert error getmetatable ipairs math next pairs pcall rawequal rawget rawset select setmetatable string
  table tonumber tostring type unpack xpcall]]
for word in words:gmatch('%S+') do env[word] = _G[word] end
env.redis = {
  call = call,
  pcall = function(...)
    local ok, answer = pcall(call, ...)
    if not ok and type(answer) ~= 'table' then error(answer, 0) end
    return answer
  end,
  error_reply = function(message) return { err = message } end,
  status_reply = function(message) return { ok = message } end,
}
env.KEYS, env.ARGV = {}, {}
setmetatable(env, { __index = function(_, word) error("global variable '" .. tostring(word) .. "'", 2) end,
  __newindex = function(_, word) error("global variable '" .. tostring(word) .. "'", 2) end })

local function compile(source)
  return setfenv(assert(loadstring(source, '@user_script')), env)
end

local slots = {}

-- The slot of a key is that of the text inside its first pair of braces.
local function slot_of(key)
  local slot = slots[key]
  if not slot then
    slot = string.match(key, '{(.-)}') or key
    slots[key] = slot
  end
  return slot
end

local out, length = {}, 0

local function add(value)
  length = length + 1
  out[length] = value
end

-- Answers travel as one flat list: true, n stands before the n elements of an inner list. An answer ends at the first
-- nil, as in Redis.
local function flatten(value, inner)
  if type(value) ~= 'table' then
    if type(value) == 'number' then
      add(value < 0 and math.ceil(value) or math.floor(value))
    elseif value == true then
      add(1)
    else
      add(value or nil)
    end
    return
  elseif value.ok then
    return add(value.ok)
  end
  if inner then
    add(true)
    add(#value)
    out[1] = 1
  end
  for i = 1, #value do flatten(value[i], true) end
end

-- Kinds of answers: 0 a flat list, 1 a nested list, 2 an error, 3 one value.
local function answer(value)
  if type(value) == 'table' and value.err then return 2, value.err end
  out[1], length = (type(value) == 'table' and not value.ok) and 0 or 3, 1
  flatten(value, false)
  return unpack(out, 1, length)
end

local function begin(time_us, key)
  now_us = time_us
  calls[#calls + 1] = { top, slot_of(key) }
end

local function run(script, time_us, count, ...)
  local given = { ... }
  local keys, argv = {}, {}
  for i = 1, count do keys[i] = given[i] end
  for i = count + 1, #given do argv[i - count] = given[i] end
  begin(time_us, keys[1])
  env.KEYS, env.ARGV = keys, argv
  return answer(script())
end

local function plain(time_us, key, name, ...)
  begin(time_us, key)
  local ok, value = pcall(call, name, ...)
  if not ok and type(value) ~= 'table' then error(value, 0) end
  return answer(value)
end

local function undo(from, to)
  for i = to, from + 1, -3 do log[i - 2][log[i - 1]] = log[i] end
end

-- Take back all calls but the first `keep`; with `lost`, a table slot -> true, only those on these slots.
local function take_back(keep, lost)
  for i = #calls, keep + 1, -1 do
    local first, slot = calls[i][1], calls[i][2]
    if slot and (not lost or lost[slot]) then
      undo(first, calls[i + 1] and calls[i + 1][1] or top)
      calls[i][2] = false
    end
    if #calls == i and calls[i][2] == false then calls[i], top = nil, first end
  end
end

local function reset()
  for key in pairs(db) do db[key] = nil end
  for map in pairs(owner) do owner[map] = nil end
  log, top, calls, slots = {}, 0, {}, {}
end

-- What the latest call wrote: key, field, new value or false of hashes and sorted sets; '', key, whether it is there now
-- of keys that came or went.
local function changes()
  length = 0
  local last = calls[#calls]
  for i = last and last[1] + 1 or top + 1, top, 3 do
    local changed, field = log[i], log[i + 1]
    local name = changed == db and '' or owner[changed]
    if name then
      local value = changed[field]
      add(name)
      add(field)
      if name == '' then value = value ~= nil end
      add(value or false)
    end
  end
  return length, unpack(out, 1, length)
end

local function peek(key)
  return db[key]
end

return { put = put, peek = peek, fail = fail, str = str, get = get, db = db, commands = commands, compile = compile, run = run,
  plain = plain, take_back = take_back, reset = reset, changes = changes,
  now_ms = function() return math.floor(now_us / 1000) end, count = function() return #calls end }
