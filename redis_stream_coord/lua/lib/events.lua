-- The event stream of a group: history for triage, and what wakes the members that block on it.
-- @include int
local KEPT = 1000

-- Append one event.
-- Parameters: key; type of the event; fields as a flat list; ids of the members that must come for an answer.
local function add(key, type, fields, wake)
  redis.call('XADD', key, 'MAXLEN', '~', KEPT, '*', 'type', type, 'wake', table.concat(wake or {}, ' '),
    unpack(fields or {}))
end

-- Id of the newest event, from which a member goes on blocking without missing one.
local function last_id(key)
  local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

return { add = add, last_id = last_id }
