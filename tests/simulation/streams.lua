-- Streams and consumer groups of the simulation's Redis; see store.lua. Gets its table, adds commands to it.
-- Entries stand in `list` from `first` to `last`, nil where one was deleted. Ids keep their text: sequence numbers may
-- exceed 2^53, and then compare only roughly, which matters for no id that the server itself gives out.
local store = ...
local put, fail, str, get, db, commands = store.put, store.fail, store.str, store.get, store.db, store.commands

local function parse(text, missing_seq)
  text = str(text)
  local ms, seq = string.match(text, '^(%d+)-(%d+)$')
  if not ms then
    ms = string.match(text, '^(%d+)$') or fail('ERR Invalid stream ID specified as stream command argument')
    seq = missing_seq or '0'
    text = ms .. '-' .. seq
  end
  return tonumber(ms), tonumber(seq), text
end

local function less(a_ms, a_seq, b_ms, b_seq)
  return a_ms < b_ms or (a_ms == b_ms and a_seq < b_seq)
end

-- First place in the list whose id is not below; deleted ones count with the one after them.
local function place(s, ms, seq)
  local low, high = s.first, s.last + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local at = middle
    while at < high and not s.list[at] do at = at + 1 end
    local entry = s.list[at]
    if at < high and less(entry.ms, entry.seq, ms, seq) then low = at + 1 else high = middle end
  end
  while low <= s.last and not s.list[low] do low = low + 1 end
  return low
end

local function find(s, ms, seq)
  local at = place(s, ms, seq)
  local entry = s.list[at]
  if entry and entry.ms == ms and entry.seq == seq then return at, entry end
end

local function make(key)
  local s = { type = 'stream', list = {}, first = 1, last = 0, n = 0, top_ms = 0, top_seq = 0, top = '0-0', groups = {} }
  put(db, key, s)
  return s
end

local function remove(s, at)
  put(s.list, at, nil)
  put(s, 'n', s.n - 1)
  local first = s.first
  while first <= s.last and not s.list[first] do first = first + 1 end
  if first ~= s.first then put(s, 'first', first) end
end

-- How many entries go: MAXLEN or MINID, [= or ~], threshold, [LIMIT n]. Roughly means whole hundreds, as of the nodes
-- of a radix tree.
local function trim(s, words, at)
  local by, rough = string.upper(words[at]), false
  at = at + 1
  if words[at] == '~' or words[at] == '=' then
    rough, at = words[at] == '~', at + 1
  end
  local excess
  if by == 'MAXLEN' then
    excess = s.n - tonumber(words[at])
  else
    local ms, seq = parse(words[at])
    excess = 0
    for i = s.first, place(s, ms, seq) - 1 do
      if s.list[i] then excess = excess + 1 end
    end
  end
  at = at + 1
  if words[at] == 'LIMIT' then
    if tonumber(words[at + 1]) > 0 then excess = math.min(excess, tonumber(words[at + 1])) end
    at = at + 2
  end
  if rough then excess = excess - excess % 100 end
  local count = 0
  while count < excess do
    remove(s, s.first)
    count = count + 1
  end
  return count, at
end

function commands.XADD(key, ...)
  local words, at, made, trimming = { ... }, 1, true, nil
  if words[at] == 'NOMKSTREAM' then made, at = false, at + 1 end
  if words[at] == 'MAXLEN' or words[at] == 'MINID' then
    trimming = at
    at = at + ((words[at + 1] == '~' or words[at + 1] == '=') and 3 or 2)
    if words[at] == 'LIMIT' then at = at + 2 end
  end
  local s = get(key, 'stream')
  if not s and not made then return false end
  if (#words - at) % 2 ~= 0 or #words == at then fail("ERR wrong number of arguments for 'xadd' command") end
  local ms, seq, text
  local top_ms, top_seq = s and s.top_ms or 0, s and s.top_seq or 0
  if words[at] == '*' then
    ms, seq = store.now_ms(), 0
    if ms <= top_ms then ms, seq = top_ms, top_seq + 1 end
    text = string.format('%.0f-%.0f', ms, seq)
  else
    ms, seq, text = parse(words[at])
    if not less(top_ms, top_seq, ms, seq) then
      fail('ERR The ID specified in XADD is equal or smaller than the target stream top item')
    end
  end
  s = s or make(key)
  local fields = {}
  for i = at + 1, #words do fields[#fields + 1] = str(words[i]) end
  put(s, 'last', s.last + 1)
  put(s.list, s.last, { ms = ms, seq = seq, id = text, fields = fields })
  put(s, 'n', s.n + 1)
  put(s, 'top_ms', ms)
  put(s, 'top_seq', seq)
  put(s, 'top', text)
  if trimming then trim(s, words, trimming) end
  return text
end

function commands.XLEN(key)
  local s = get(key, 'stream')
  return s and s.n or 0
end

function commands.XDEL(key, ...)
  local s, count = get(key, 'stream'), 0
  for _, id in ipairs(s and { ... } or {}) do
    local at = find(s, parse(id))
    if at then
      remove(s, at)
      count = count + 1
    end
  end
  return count
end

function commands.XTRIM(key, ...)
  local s = get(key, 'stream')
  return s and (trim(s, { ... }, 1)) or 0
end

-- Bounds of a range as ms and seq of the first that is in it and of the last that is.
local function low_bound(text)
  if text == '-' then return 0, 0 end
  local open = string.sub(text, 1, 1) == '('
  local ms, seq = parse(open and string.sub(text, 2) or text)
  return ms, open and seq + 1 or seq
end

local function high_bound(text)
  if text == '+' then return math.huge, math.huge end
  local open = string.sub(text, 1, 1) == '('
  local ms, seq = parse(open and string.sub(text, 2) or text, '18446744073709551615')
  return ms, open and seq - 1 or seq
end

local function count_of(word, value)
  if not word then return math.huge end
  return string.upper(word) == 'COUNT' and tonumber(value) or fail('ERR syntax error')
end

function commands.XRANGE(key, from, to, word, value)
  local s, out, most = get(key, 'stream'), {}, count_of(word, value)
  if not s then return out end
  local ms, seq = low_bound(from)
  local end_ms, end_seq = high_bound(to)
  local at, n = place(s, ms, seq), 0
  while at <= s.last and n < most do
    local entry = s.list[at]
    if entry then
      if less(end_ms, end_seq, entry.ms, entry.seq) then break end
      n = n + 1
      out[n] = { entry.id, entry.fields }
    end
    at = at + 1
  end
  return out
end

function commands.XREVRANGE(key, to, from, word, value)
  local s, out, most = get(key, 'stream'), {}, count_of(word, value)
  if not s then return out end
  local ms, seq = low_bound(from)
  local end_ms, end_seq = high_bound(to)
  local at, n = s.last, 0
  while at >= s.first and n < most do
    local entry = s.list[at]
    if entry and less(entry.ms, entry.seq, ms, seq) then break end
    if entry and not less(end_ms, end_seq, entry.ms, entry.seq) then
      n = n + 1
      out[n] = { entry.id, entry.fields }
    end
    at = at - 1
  end
  return out
end

-- --- consumer groups -------------------------------------------------------------------------------------------------

local function group_of(key, name)
  local s = get(key, 'stream')
  return s, s and s.groups[name]
end

local function no_group(key, name)
  fail("NOGROUP No such key '" .. key .. "' or consumer group '" .. name .. "'")
end

local function consumer_of(g, name)
  if not g.consumers[name] then put(g.consumers, name, true) end
end

-- What is pending in order of ids.
local function pending(g)
  local rows = {}
  for _, row in pairs(g.pending) do rows[#rows + 1] = row end
  table.sort(rows, function(a, b) return less(a.ms, a.seq, b.ms, b.seq) end)
  return rows
end

function commands.XGROUP(word, key, name, id, option)
  local s, g = group_of(key, name)
  if word == 'CREATE' then
    if not s and option ~= 'MKSTREAM' then
      fail('ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM '
        .. 'option to create an empty stream automatically.')
    end
    local at
    if id ~= '$' then at = { parse(id) } end
    s = s or make(key)
    if g then fail('BUSYGROUP Consumer Group name already exists') end
    at = at or { s.top_ms, s.top_seq, s.top }
    put(s.groups, name, { ms = at[1], seq = at[2], id = at[3], pending = {}, count = 0, consumers = {} })
    return { ok = 'OK' }
  end
  if not s then
    fail('ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM '
      .. 'option to create an empty stream automatically.')
  end
  if word == 'DESTROY' then
    if not g then return 0 end
    put(s.groups, name, nil)
    return 1
  end
  if not g then fail("NOGROUP No such consumer group '" .. name .. "' for key name '" .. key .. "'") end
  if word == 'SETID' then
    local ms, seq, text = s.top_ms, s.top_seq, s.top
    if id ~= '$' then ms, seq, text = parse(id) end
    put(g, 'ms', ms)
    put(g, 'seq', seq)
    put(g, 'id', text)
    return { ok = 'OK' }
  end
  if word ~= 'DELCONSUMER' then fail("ERR unknown subcommand '" .. word .. "'") end
  local count = 0
  for _, row in ipairs(pending(g)) do
    if row.consumer == id then
      put(g.pending, row.id, nil)
      put(g, 'count', g.count - 1)
      count = count + 1
    end
  end
  put(g.consumers, id, nil)
  return count
end

local function names(map)
  local out = {}
  for name in pairs(map) do out[#out + 1] = name end
  table.sort(out)
  return out
end

function commands.XINFO(word, key, name)
  local s = get(key, 'stream') or fail('ERR no such key')
  local out = {}
  if word == 'GROUPS' then
    for i, one in ipairs(names(s.groups)) do
      local g = s.groups[one]
      out[i] = { 'name', one, 'consumers', #names(g.consumers), 'pending', g.count, 'last-delivered-id', g.id }
    end
    return out
  elseif word == 'STREAM' then
    return { 'length', s.n, 'last-generated-id', s.top, 'groups', #names(s.groups) }
  end
  local g = s.groups[name] or fail("NOGROUP No such consumer group '" .. name .. "' for key name '" .. key .. "'")
  local counts = {}
  for _, row in pairs(g.pending) do counts[row.consumer] = (counts[row.consumer] or 0) + 1 end
  for i, one in ipairs(names(g.consumers)) do out[i] = { 'name', one, 'pending', counts[one] or 0 } end
  return out
end

function commands.XREADGROUP(_, name, consumer, ...)
  local words, at, most = { ... }, 1, math.huge
  if words[at] == 'COUNT' then most, at = tonumber(words[at + 1]), at + 2 end
  local key, after = words[at + 1], words[at + 2]
  if words[at] ~= 'STREAMS' or after ~= '>' then fail('ERR syntax error') end
  local s, g = group_of(key, name)
  if not g then
    fail("NOGROUP No such key '" .. key .. "' or consumer group '" .. name .. "' in XREADGROUP with GROUP option")
  end
  local out, place_at = {}, place(s, g.ms, g.seq + 1)
  while place_at <= s.last and #out < most do
    local entry = s.list[place_at]
    if entry then
      -- Where nothing is read, versions differ in whether the consumer is made.
      consumer_of(g, consumer)
      out[#out + 1] = { entry.id, entry.fields }
      put(g.pending, entry.id, { ms = entry.ms, seq = entry.seq, id = entry.id, consumer = consumer, count = 1 })
      put(g, 'count', g.count + 1)
      put(g, 'ms', entry.ms)
      put(g, 'seq', entry.seq)
      put(g, 'id', entry.id)
    end
    place_at = place_at + 1
  end
  return #out > 0 and { { key, out } }
end

function commands.XACK(key, name, ...)
  local _, g = group_of(key, name)
  local count = 0
  for _, id in ipairs(g and { ... } or {}) do
    local _, _, text = parse(id)
    if g.pending[text] then
      put(g.pending, text, nil)
      put(g, 'count', g.count - 1)
      count = count + 1
    end
  end
  return count
end

function commands.XPENDING(key, name, from, to, most, consumer)
  local _, g = group_of(key, name)
  if not g then no_group(key, name) end
  if not from then
    if g.count == 0 then return { 0, false, false, false } end
    local rows, counts, out = pending(g), {}, {}
    for _, row in ipairs(rows) do counts[row.consumer] = (counts[row.consumer] or 0) + 1 end
    for i, one in ipairs(names(counts)) do out[i] = { one, str(counts[one]) } end
    return { g.count, rows[1].id, rows[#rows].id, out }
  end
  local out = {}
  if g.count == 0 then return out end
  local ms, seq = low_bound(from)
  local end_ms, end_seq = high_bound(to)
  most = tonumber(most)
  for _, row in ipairs(pending(g)) do
    if #out == most then break end
    local inside = not less(row.ms, row.seq, ms, seq) and not less(end_ms, end_seq, row.ms, row.seq)
    if inside and (not consumer or row.consumer == consumer) then out[#out + 1] = { row.id, row.consumer, 0, row.count } end
  end
  return out
end

function commands.XCLAIM(key, name, consumer, idle, ...)
  local s, g = group_of(key, name)
  if not g then no_group(key, name) end
  if tonumber(idle) ~= 0 then fail('ERR the simulation does not count idle time') end
  local words, ids, retries, just_ids, out = { ... }, {}, nil, false, {}
  local at = 1
  while at <= #words do
    local word = str(words[at])
    if word == 'RETRYCOUNT' then
      retries, at = tonumber(words[at + 1]), at + 2
    elseif word == 'JUSTID' then
      just_ids, at = true, at + 1
    else
      local _, _, text = parse(word)
      ids[#ids + 1], at = text, at + 1
    end
  end
  for _, id in ipairs(ids) do
    local row = g.pending[id]
    local _, entry
    if row then _, entry = find(s, row.ms, row.seq) end
    if row and not entry then
      -- Since Redis 7 what was deleted is not claimed, and pending no more.
      put(g.pending, id, nil)
      put(g, 'count', g.count - 1)
    elseif row then
      consumer_of(g, consumer)
      local count = retries or (just_ids and row.count or row.count + 1)
      put(g.pending, id, { ms = row.ms, seq = row.seq, id = id, consumer = consumer, count = count })
      out[#out + 1] = just_ids and id or { entry.id, entry.fields }
    end
  end
  return out
end

-- --- for the judge: not commands of Redis, and never counted as calls -------------------------------------------------

-- How an entry stands with a group: 0 gone from the stream, 1 to be delivered, 2 pending, 3 finished, 4 no such group.
function store.standing(key, name, id)
  local s = db[key]
  local ms, seq = parse(id)
  if not s or not find(s, ms, seq) then return 0 end
  local g = s.groups[name]
  if not g then return 4 end
  if less(g.ms, g.seq, ms, seq) then return 1 end
  return g.pending[id] and 2 or 3
end

-- The ids that are in a stream.
function store.ids(key)
  local s, out = db[key], {}
  if not s then return unpack(out) end
  for at = s.first, s.last do
    if s.list[at] then out[#out + 1] = s.list[at].id end
  end
  return #out, unpack(out)
end

-- A hash as it is, without a call.
function store.hash(key)
  local value, out = db[key], {}
  for field, one in pairs(value and value.map or {}) do
    out[#out + 1] = field
    out[#out + 1] = one
  end
  return #out, unpack(out)
end
