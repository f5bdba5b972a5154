-- One entry per administrative mutation, accepted, refused or failed, in the same script as the mutation; and what is
-- decided from the entries of before: the same request is answered as it was, and too many are refused.
-- @include refuse
-- @include int
-- @include clock
-- @error CORRUPT_METADATA
-- @error FAILED_BEFORE
-- @error RATE_LIMITED
-- @error REQUEST_ID_REUSED
local KEPT = 10000
local SEARCHED = 1000
local COUNT, SECONDS = 60, 60
-- Outcomes of requests that may be sent again under the same id: the request was not looked at, or not finished.
local OPEN = { limited = true, unfinished = true }

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end

-- What was recorded for a request id and action, among the last `SEARCHED` entries: field -> value, or nil.
local function find(key, action, request_id)
  for _, entry in ipairs(redis.call('XREVRANGE', key, '+', '-', 'COUNT', SEARCHED)) do
    local fields = fields_of(entry)
    if fields['request_id'] == request_id and fields['action'] == action and not OPEN[fields['outcome']] then
      return fields
    end
  end
end

-- What the caller's user may do in this group or stream, as Redis itself says it. Before Redis 7 it cannot say; whoever
-- gets here may write the audit, and that makes a WRITE.
local function roles(key, stream)
  local may = redis.acl_check_cmd
  if not may then return 'WRITE' end
  local base, found = string.match(key, '^(.*:)audit$'), {}
  if may('HGETALL', base .. 'metadata') then found[#found + 1] = 'READ' end
  if may('XADD', key, '*', 'field', 'value') then found[#found + 1] = 'WRITE' end
  if may('ZADD', base .. 'leases', '1', 'member') then found[#found + 1] = 'MEMBER' end
  if may('XADD', stream .. ':0', '*', 'field', 'value') then found[#found + 1] = 'PRODUCER' end
  return table.concat(found, ' ')
end

-- Parameters: key; action; outcome: accepted, refused, failed, limited or unfinished; word: OK or the error word;
--   detail; arg: the script's arguments, which carry `audit`, a flat list of the request's own fields.
local function add(key, action, outcome, word, detail, arg)
  local own = fields_of({ '', arg.audit })
  redis.call('XADD', key, 'MAXLEN', '~', KEPT, '*', 'action', action, 'outcome', outcome, 'word', word, 'detail',
    detail, 'request_id', arg.request_id, 'roles', roles(key, own['stream'] or ''), unpack(arg.audit))
end

-- How many mutations a principal may ask for, in how many seconds: `count/seconds` in the field of its name, or in `*`
-- for everybody else.
local function limit(key, principal)
  local values = redis.call('HMGET', key, principal, '*')
  local value = values[1] or values[2]
  if not value then return COUNT, SECONDS end
  local count, seconds = string.match(value, '^(%d+)/([1-9]%d*)$')
  if not count then refuse('CORRUPT_METADATA', key .. ' has ' .. value) end
  return tonumber(count), tonumber(seconds)
end

local function check_rate(key, limits, action, arg, principal)
  local count, seconds = limit(limits, principal)
  local now, seen, oldest, noted = clock.now_ms(), 0, nil, false
  local from = int(math.max(0, now - seconds * 1000))
  for _, entry in ipairs(redis.call('XREVRANGE', key, '+', from, 'COUNT', SEARCHED)) do
    local fields = fields_of(entry)
    if (fields['principal'] or 'unknown') == principal then
      noted = noted or fields['outcome'] == 'limited'
      if not OPEN[fields['outcome']] then seen, oldest = seen + 1, string.match(entry[1], '^%d+') end
    end
    if seen >= count then break end
  end
  if seen < count then return end
  local wait = int(math.max(1, tonumber(oldest or now) + seconds * 1000 - now))
  -- The first of a window is enough: else whoever asks too often pushes everything else out of the history.
  if not noted then add(key, action, 'limited', 'RATE_LIMITED', wait, arg) end
  refuse('RATE_LIMITED', wait)
end

-- Before a mutation does anything: a request that was decided before is answered as it was then.
-- Parameters: key; limits: key of the rate limits; action; arg.
-- Returns: the recorded detail if it was accepted then, or nil.
local function begin(key, limits, action, arg)
  local own, before = fields_of({ '', arg.audit }), find(key, action, arg.request_id)
  if not before then return check_rate(key, limits, action, arg, own['principal'] or 'unknown') end
  if before['fingerprint'] ~= own['fingerprint'] then refuse('REQUEST_ID_REUSED', action .. ' ' .. arg.request_id) end
  if before['outcome'] == 'accepted' then return before['detail'] end
  if before['word'] == '-' then refuse('FAILED_BEFORE', before['detail']) end
  refuse(before['word'], before['detail'])
end

-- Refuse a mutation, on the record.
local function deny(key, action, arg, word, detail)
  add(key, action, 'refused', word, detail, arg)
  refuse(word, detail)
end

return { find = find, add = add, begin = begin, deny = deny }
