-- One entry per administrative mutation, accepted or refused, in the same script as the mutation.
-- @include int
local KEPT = 10000
local SEARCHED = 1000

-- What was recorded for a request id and action, among the last `SEARCHED` entries: field -> value, or nil.
local function find(key, action, request_id)
  for _, entry in ipairs(redis.call('XREVRANGE', key, '+', '-', 'COUNT', SEARCHED)) do
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    if fields['request_id'] == request_id and fields['action'] == action then return fields end
  end
end

-- Parameters: key; action; outcome: accepted or refused; word: OK or the error word; detail; arg: the script's
--   arguments, which carry `audit`, a flat list of the request's own fields.
local function add(key, action, outcome, word, detail, arg)
  redis.call('XADD', key, 'MAXLEN', '~', KEPT, '*', 'action', action, 'outcome', outcome, 'word', word, 'detail',
    detail, 'request_id', arg.request_id, unpack(arg.audit))
end

return { find = find, add = add }
