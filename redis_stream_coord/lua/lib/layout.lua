-- The record of a logical stream: its shards, how keys are routed to them, and its groups.
-- @include refuse
-- @include int
-- @include header
-- @error CORRUPT_METADATA
-- @error STREAM_NOT_FOUND
-- @error UNSUPPORTED_PROTOCOL
local TEXTS = { 'schema', 'stream', 'routing', 'layout', 'earlier', 'state', 'retention', 'saga', 'barriers' }
local NUMBERS = { 'protocol_min', 'protocol_max', 'incarnation', 'version', 'epoch', 'shards', 'group_count',
  'drawn', 'top', 'cuts_count' }

-- A resharding as it is written.
local SAGA = '^id=(%w+) state=(%u+) epoch=(%d+) from=(%d+) to=(%d+) ordered=([01]) quiesce=([01]) back=([01]) '
  .. 'opened=([01]) void=(%d+) began_ms=(%d+) changed_ms=(%d+) reason=(.+)$'

-- Identity of a whole layout. Its nonce tells layouts of one epoch and size apart, if a record was ever restored.
local function id(epoch, shards, nonce)
  return int(epoch) .. ':' .. int(shards) .. ':' .. nonce
end

-- So many earlier layouts are kept.
local EARLIER = 16

-- Returns: the header's fields, or refuses.
local function open(key, protocol)
  local record = header.read(key, TEXTS, NUMBERS, 'STREAM_NOT_FOUND')
  if redis.call('HLEN', key) ~= #TEXTS + #NUMBERS + record.group_count + record.cuts_count then
    refuse('CORRUPT_METADATA', 'number of fields of the stream record')
  end
  local nonce = string.match(record.layout, '^' .. int(record.epoch) .. ':' .. int(record.shards) .. ':(%w+)$')
  if not nonce or (record.state ~= 'creating' and record.state ~= 'active') then
    refuse('CORRUPT_METADATA', 'layout or state of the stream record')
  end
  if record.earlier ~= '-' and string.gsub(record.earlier .. ',', '%d+:%d+:%w+@%d+,', '') ~= '' then
    refuse('CORRUPT_METADATA', 'earlier layouts of the stream record')
  end
  local retention = record.retention
  if retention ~= 'all' and retention ~= 'consumed' and not string.match(retention, '^keep:%d+$') then
    refuse('CORRUPT_METADATA', 'retention of the stream record')
  end
  local barriers = string.gsub(record.barriers .. ',', '%d+:%d+:%d+,', '')
  if (record.saga ~= '-' and not string.match(record.saga, SAGA)) or (barriers ~= '' and record.barriers ~= '-') then
    refuse('CORRUPT_METADATA', 'resharding of the stream record')
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
    record.layout, record.state, record.retention, groups, string.match(record.saga, ' state=(%u+) ') or '-' }
end

-- What a deciding write stores as `earlier`: the layouts before, each as `<layout id>@<ms at which it ended>`, oldest
-- first, '-' for none. Producers look there for event ids: a key may have lived on another shard then.
-- Parameters: record whose layout ends now; now in ms.
local function ended(record, now_ms)
  local kept = {}
  for one in string.gmatch(record.earlier, '[^,]+') do
    if one ~= '-' then kept[#kept + 1] = one end
  end
  kept[#kept + 1] = record.layout .. '@' .. int(now_ms)
  return table.concat(kept, ',', math.max(1, #kept - EARLIER + 1))
end

-- Parameters: record; time in ms. Returns: ids of the layouts that ended since then, oldest first.
local function ended_since(record, since_ms)
  local found = {}
  for id, at_ms in string.gmatch(record.earlier, '([^,@]+)@(%d+)') do
    if tonumber(at_ms) >= since_ms then found[#found + 1] = id end
  end
  return found
end

return { SAGA = SAGA, id = id, open = open, answer = answer, ended = ended, ended_since = ended_since }
