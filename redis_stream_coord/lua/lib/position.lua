-- How far a group got on a shard: the id up to which everything is acknowledged.

-- '5-3' -> '5-2', '5-0' -> '4-18446744073709551615'. In decimal by hand: sequence numbers exceed 2^53.
local function before(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  local function decrement(digits)
    local head, last, zeros = string.match(digits, '^(%d*)([1-9])(0*)$')
    local text = head .. string.char(string.byte(last) - 1) .. string.rep('9', #zeros)
    return string.match(text, '^0*(%d+)$')
  end
  if seq ~= '0' then return ms .. '-' .. decrement(seq) end
  if ms == '0' then return '0-0' end
  return decrement(ms) .. '-18446744073709551615'
end

-- Id of the last entry that was delivered to the group; nil if the group is not there.
local function last_delivered(stream, group)
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local fields = {}
    for i = 1, #info, 2 do fields[info[i]] = info[i + 1] end
    if fields['name'] == group then return fields['last-delivered-id'] end
  end
end

-- The id just before the smallest pending entry, or the last delivered one if nothing is pending. The highest
-- acknowledged id would lose what is pending below it when the group is created anew there.
local function of(stream, group)
  local pending = redis.call('XPENDING', stream, group)
  if pending[1] > 0 then return before(pending[2]) end
  return last_delivered(stream, group)
end

-- Compare ids as numbers: by length first, then digit by digit, because sequence numbers exceed 2^53.
local function less(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  local function compare(x, y)
    if #x ~= #y then return #x < #y and -1 or 1 end
    return x == y and 0 or (x < y and -1 or 1)
  end
  local by_ms = compare(a_ms, b_ms)
  if by_ms ~= 0 then return by_ms < 0 end
  return compare(a_seq, b_seq) < 0
end

-- The position of the group that is furthest behind, whoever registered it: everything up to it is acknowledged by all.
local function needed_from(stream)
  local lowest
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local fields = {}
    for i = 1, #info, 2 do fields[info[i]] = info[i + 1] end
    local position = of(stream, fields['name'])
    if not lowest or less(position, lowest) then lowest = position end
  end
  return lowest
end

-- Whether any group of the stream, whoever registered it, has yet to get or to acknowledge this very entry. What is
-- unfinished below it does not matter: with several keys at once entries are finished in any order.
local function needs(stream, id)
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local fields = {}
    for i = 1, #info, 2 do fields[info[i]] = info[i + 1] end
    if less(fields['last-delivered-id'], id) then return true end
    if #redis.call('XPENDING', stream, fields['name'], id, id, 1) > 0 then return true end
  end
  return false
end

-- The highest id that a stream has ever given out; 0-0 if it is not there.
local function last_id(stream)
  local info = redis.call('EXISTS', stream) == 1 and redis.call('XINFO', 'STREAM', stream) or {}
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
  return '0-0'
end

return { last_id = last_id, before = before, last_delivered = last_delivered, of = of, less = less,
  needed_from = needed_from, needs = needs }
