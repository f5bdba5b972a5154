-- The record of a logical stream: its shards, how keys are routed to them, and its groups.
-- @include refuse
-- @include int
-- @include header
-- @error CORRUPT_METADATA
-- @error STREAM_NOT_FOUND
-- @error UNSUPPORTED_PROTOCOL
local TEXTS = { 'schema', 'stream', 'routing', 'layout', 'state', 'retention' }
local NUMBERS = { 'protocol_min', 'protocol_max', 'incarnation', 'version', 'epoch', 'shards', 'group_count' }

-- Returns: the header's fields, or refuses.
local function open(key, protocol)
  local record = header.read(key, TEXTS, NUMBERS, 'STREAM_NOT_FOUND')
  if redis.call('HLEN', key) ~= #TEXTS + #NUMBERS + record.group_count then
    refuse('CORRUPT_METADATA', 'number of fields of the stream record')
  end
  local nonce = string.match(record.layout, '^' .. int(record.epoch) .. ':' .. int(record.shards) .. ':(%w+)$')
  if not nonce or (record.state ~= 'creating' and record.state ~= 'active') then
    refuse('CORRUPT_METADATA', 'layout or state of the stream record')
  end
  local retention = record.retention
  if retention ~= 'all' and retention ~= 'consumed' and not string.match(retention, '^keep:%d+$') then
    refuse('CORRUPT_METADATA', 'retention of the stream record')
  end
  if not string.find(key, '{' .. record.stream .. '}', 1, true) then
    refuse('CORRUPT_METADATA', 'the record is of stream ' .. record.stream)
  end
  if protocol < record.protocol_min or protocol > record.protocol_max then
    refuse('UNSUPPORTED_PROTOCOL', int(record.protocol_min) .. ' to ' .. int(record.protocol_max))
  end
  return record
end

-- Parameters: record; key of the record. The names of the registered groups come last.
local function answer(record, key)
  local groups = {}
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local group = string.match(field, '^group:(.+)$')
    if group then groups[#groups + 1] = group end
  end
  table.sort(groups)
  return { 'OK', int(record.version), int(record.incarnation), int(record.epoch), int(record.shards), record.routing,
    record.layout, record.state, record.retention, groups }
end

return { open = open, answer = answer }
