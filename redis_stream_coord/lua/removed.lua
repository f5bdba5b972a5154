-- What lies on a shard that the layout has no more, for people. Writes nothing.
-- @include position
-- @key stream
-- @key route
-- @key published
-- @returns OK, number of entries, bytes or -1, number of event ids, epoch of the route or '', its state or '', then of
--   each consumer group: name, id of the first entry that it has not finished or ''
local length, groups = 0, {}
if redis.call('EXISTS', key.stream) == 1 then
  length, groups = redis.call('XLEN', key.stream), redis.call('XINFO', 'GROUPS', key.stream)
end

-- A user may lack the right to ask, and not every server has the command.
local function bytes_of(name)
  local usage = redis.pcall('MEMORY', 'USAGE', name) or 0
  return type(usage) == 'number' and usage or nil
end

local stream_bytes, published_bytes = bytes_of(key.stream), bytes_of(key.published)
local bytes = stream_bytes and published_bytes and stream_bytes + published_bytes or -1
local ends = redis.call('HMGET', key.published, 'tail', 'head')
local where = redis.call('HMGET', key.route, 'epoch', 'state')
local reply = { 'OK', length, bytes, tonumber(ends[2] or '0') - tonumber(ends[1] or '1') + 1, where[1] or '',
  where[2] or '' }
for _, info in ipairs(groups) do
  local fields = {}
  for i = 1, #info, 2 do fields[info[i]] = info[i + 1] end
  local first = redis.call('XRANGE', key.stream, '(' .. position.of(key.stream, fields['name']), '+', 'COUNT', 1)[1]
  reply[#reply + 1] = fields['name']
  reply[#reply + 1] = first and first[1] or ''
end
return reply
