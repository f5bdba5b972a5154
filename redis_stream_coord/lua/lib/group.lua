-- The record of one group: opened by its header, read field by field as far as a script needs it, and written
-- back in one HSET. So a steady heartbeat costs the same however large the group is.
--
-- A shard's holder and token stand twice, in `shard:<i>` and in its holder's `member:<id>`: the first answers
-- "who has it", the second "what have I" in one field. They are changed together, by the functions below only,
-- and held against each other whenever everything is loaded, which finds damage done by hand.
-- @include refuse
-- @include int
-- @include header
-- @include round
-- @error CORRUPT_METADATA
-- @error GROUP_NOT_FOUND
-- @error UNSUPPORTED_PROTOCOL
local TEXTS = { 'schema', 'stream', 'group', 'duty', 'round', 'frozen' }
local NUMBERS = { 'protocol_min', 'protocol_max', 'incarnation', 'version', 'group_epoch', 'assignment_epoch',
  'grant_counter', 'next_due_ms', 'heartbeat_ms', 'lease_ms', 'rebalance_ms', 'member_count', 'shard_count',
  'layout_epoch', 'layout_step' }
local MUTABLE = { 'version', 'group_epoch', 'assignment_epoch', 'grant_counter', 'next_due_ms', 'member_count',
  'shard_count', 'layout_epoch', 'layout_step' }
local MEMBER = '^nonce=(%w+) epoch=(%d+) changed=([01]) weight=(%d+) joined_ms=(%d+) state=(%a+) '
  .. 'assigned=(%S+) revoking=(%S+) pending=(%S+)$'
local SHARD = '^target=(%S+) holder=(%S+) token=(%d+) state=(%a+) deadline_ms=(%d+) hold_until_ms=(%d+) '
  .. 'readable=([01])$'
local DUTY = '^member=(%S+) since_ms=(%d+)$'
local SHARD_STATES = { free = true, assigned = true, revoking = true }
local MEMBER_STATES = { active = true, leaving = true }

-- { [0] = 17, [3] = 18 } -> '0:17,3:18', shard and token; { [0] = true, [3] = true } -> '0,3'; '-' for none.
local function format_list(shards)
  local order, parts = {}, {}
  for shard in pairs(shards) do order[#order + 1] = shard end
  table.sort(order)
  for i, shard in ipairs(order) do
    local value = shards[shard]
    parts[i] = int(shard) .. (value == true and '' or ':' .. int(value))
  end
  return #parts > 0 and table.concat(parts, ',') or '-'
end

-- The way back; nil for anything that is not written so, from the first character to the last, in ascending order.
local function parse(text, pattern)
  local shards, last, at = {}, -1, 1
  if text == '-' then return shards end
  for from, shard, token, comma, to in string.gmatch(text, pattern) do
    shard = tonumber(shard)
    if from ~= at or shard <= last or (comma == '') ~= (to > #text) then return nil end
    shards[shard], last, at = type(token) == 'number' or tonumber(token), shard, to
  end
  return last >= 0 and at > #text and shards or nil
end

local function parse_held(text) return parse(text, '()(%d+):(%d+)(,?)()') end

-- A place instead of a token: shards only.
local function parse_set(text) return parse(text, '()(%d+)()(,?)()') end

local function some(text) return text ~= '-' and text or nil end

local function load_member(g, id, text)
  if not text then
    g.members[id] = false
    return false
  end
  local nonce, epoch, changed, weight, joined, state, assigned, revoking, pending = string.match(text, MEMBER)
  local m = nonce and { id = id, nonce = nonce, epoch = tonumber(epoch), changed = changed == '1',
    weight = tonumber(weight), joined_ms = tonumber(joined), state = state, listed = assigned,
    assigned = parse_held(assigned), revoking = parse_held(revoking), pending = parse_set(pending) }
  if not m or not MEMBER_STATES[state] or not m.assigned or not m.revoking or not m.pending then
    refuse('CORRUPT_METADATA', 'member:' .. id)
  end
  g.members[id] = m
  return m
end

local function load_shard(g, index, text)
  local target, holder, token, state, deadline, hold, readable = string.match(text or '', SHARD)
  if not target or not SHARD_STATES[state] or (holder == '-') ~= (state == 'free') then
    refuse('CORRUPT_METADATA', 'shard:' .. int(index))
  end
  local s = { index = index, target = some(target), holder = some(holder), token = tonumber(token), state = state,
    deadline_ms = tonumber(deadline), hold_until_ms = tonumber(hold),
    readable = readable == '1' }
  g.shards[index] = s
  return s
end

-- Open the record of a group by its header.
local function open(key)
  local g = header.read(key, TEXTS, NUMBERS, 'GROUP_NOT_FOUND')
  if redis.call('HLEN', key) ~= #TEXTS + #NUMBERS + g.member_count + g.shard_count then
    refuse('CORRUPT_METADATA', 'number of fields')
  end
  local on_duty, since = string.match(g.duty, DUTY)
  g.on_duty, g.duty_ms = on_duty, tonumber(since)
  if not on_duty then refuse('CORRUPT_METADATA', 'duty') end
  if not string.find(key, '{' .. g.stream .. ':' .. g.group .. '}', 1, true) then
    refuse('CORRUPT_METADATA', 'the record is of ' .. g.stream .. ' and ' .. g.group)
  end
  if g.frozen ~= '-' and not string.match(g.frozen, '^%d+$') then refuse('CORRUPT_METADATA', 'frozen') end
  g.round, g.frozen = round.parse(g.round) or refuse('CORRUPT_METADATA', 'round'), tonumber(g.frozen) or false
  g.key, g.members, g.shards, g.gone, g.stored = key, {}, {}, {}, { frozen = g.frozen }
  for _, name in ipairs(MUTABLE) do g.stored[name] = g[name] end
  return g
end

local function check_protocol(g, protocol)
  if protocol < g.protocol_min or protocol > g.protocol_max then
    refuse('UNSUPPORTED_PROTOCOL', int(g.protocol_min) .. ' to ' .. int(g.protocol_max))
  end
end

-- One member, or false.
local function member(g, id)
  local m = g.members[id]
  if m ~= nil then return m end
  if g.complete then return false end
  return load_member(g, id, redis.call('HGET', g.key, 'member:' .. id))
end

-- One shard; a shard that is named anywhere but has no field is damage.
local function shard(g, index)
  return g.shards[index] or load_shard(g, index, redis.call('HGET', g.key, 'shard:' .. int(index)))
end

-- A shard that nobody shall read any more, and nobody holds: the group forgets it.
local function drop(g, s)
  local m = s.target and member(g, s.target)
  if m then m.pending[s.index], m.dirty = nil, true end
  s.dropped, s.target, g.shard_count = true, nil, g.shard_count - 1
end

local function check_lists(g)
  local listed = 0
  for id, m in pairs(g.members) do
    for state, held in pairs({ assigned = m and m.assigned or {}, revoking = m and m.revoking or {} }) do
      for index, token in pairs(held) do
        local s = g.shards[index]
        if not s or s.holder ~= id or s.token ~= token or s.state ~= state then
          refuse('CORRUPT_METADATA', 'member:' .. id .. ' and shard:' .. int(index) .. ' disagree')
        end
        listed = listed + 1
      end
    end
  end
  for index, s in pairs(g.shards) do
    if s.holder then listed = listed - 1 end
    if s.holder and not g.members[s.holder] then refuse('CORRUPT_METADATA', 'holder of shard:' .. int(index)) end
  end
  if listed ~= 0 then refuse('CORRUPT_METADATA', 'a holder does not list its shard') end
end

-- Load everything that is not loaded yet, and hold the two sides against each other.
local function complete(g)
  if g.complete then return end
  local fields, members, shards = redis.call('HGETALL', g.key), 0, 0
  for i = 1, #fields, 2 do
    local kind, name = string.match(fields[i], '^(%a+):(.+)$')
    if kind == 'member' then
      members = members + 1
      if g.members[name] == nil then load_member(g, name, fields[i + 1]) end
    elseif kind == 'shard' and string.match(name, '^%d+$') then
      shards = shards + 1
      if g.shards[tonumber(name)] == nil then load_shard(g, tonumber(name), fields[i + 1]) end
    elseif g[fields[i]] == nil then
      refuse('CORRUPT_METADATA', 'unknown field ' .. fields[i])
    end
  end
  if members ~= g.stored.member_count or shards ~= g.stored.shard_count then
    refuse('CORRUPT_METADATA', 'number of fields')
  end
  check_lists(g)
  g.complete, g.order = true, {}
  for index in pairs(g.shards) do g.order[#g.order + 1] = index end
  table.sort(g.order)
end

local function format_member(m)
  return 'nonce=' .. m.nonce .. ' epoch=' .. int(m.epoch) .. ' changed=' .. (m.changed and '1' or '0')
    .. ' weight=' .. int(m.weight) .. ' joined_ms=' .. int(m.joined_ms) .. ' state=' .. m.state .. ' assigned='
    .. format_list(m.assigned) .. ' revoking=' .. format_list(m.revoking) .. ' pending=' .. format_list(m.pending)
end

local function format_shard(s)
  return 'target=' .. (s.target or '-') .. ' holder=' .. (s.holder or '-') .. ' token=' .. int(s.token)
    .. ' state=' .. s.state .. ' deadline_ms=' .. int(s.deadline_ms) .. ' hold_until_ms=' .. int(s.hold_until_ms)
    .. ' readable=' .. (s.readable and '1' or '0')
end

-- Write back what changed, under the next version; nothing changed, nothing written. `next_due_ms` alone is no change:
-- it follows from the rest, and is put right after the deadline of what was drained in time has passed.
local function save(g)
  local out = {}
  for id, m in pairs(g.members) do
    if m and m.dirty then
      out[#out + 1] = 'member:' .. id
      out[#out + 1] = format_member(m)
    end
  end
  local dropped = {}
  for index, s in pairs(g.shards) do
    if s.dropped then
      dropped[#dropped + 1] = 'shard:' .. int(index)
    elseif s.dirty then
      out[#out + 1] = 'shard:' .. int(index)
      out[#out + 1] = format_shard(s)
    end
  end
  if g.round.dirty then
    out[#out + 1] = 'round'
    out[#out + 1] = round.format(g.round)
  end
  if g.frozen ~= g.stored.frozen then
    out[#out + 1] = 'frozen'
    out[#out + 1] = g.frozen and int(g.frozen) or '-'
  end
  local changed = #out > 0 or next(g.gone) or #dropped > 0
  for _, name in ipairs(MUTABLE) do changed = changed or name ~= 'next_due_ms' and g[name] ~= g.stored[name] end
  if changed then g.version = g.version + 1 end
  for _, name in ipairs(MUTABLE) do
    if g[name] ~= g.stored[name] then
      out[#out + 1] = name
      out[#out + 1] = int(g[name])
    end
  end
  for id in pairs(g.gone) do
    if not g.members[id] then redis.call('HDEL', g.key, 'member:' .. id) end
  end
  for _, field in ipairs(dropped) do redis.call('HDEL', g.key, field) end
  -- unpack is limited to some thousand values.
  for first = 1, #out, 1000 do
    redis.call('HSET', g.key, unpack(out, first, math.min(first + 999, #out)))
  end
end

return { open = open, check_protocol = check_protocol, member = member, shard = shard, drop = drop, complete = complete,
  save = save, parse_held = parse_held, format_list = format_list,
  format_shard = format_shard, TEXTS = TEXTS, NUMBERS = NUMBERS }
