-- One shard as it is at this moment, for people, metrics and triage. Writes nothing.
-- @include clock
-- @include int
-- @key stream
-- @key fence
-- @key route
-- @arg group string
-- @returns OK, now, length or -1 without a stream, bytes or -1, XINFO STREAM, XINFO GROUPS, XINFO CONSUMERS,
--   the first pending entry, 1 if something is not delivered, fence, route
local length, bytes, info, groups, consumers, oldest, more = -1, -1, {}, {}, {}, {}, 0
if redis.call('EXISTS', key.stream) == 1 then
  length, info, groups = redis.call('XLEN', key.stream), {}, redis.call('XINFO', 'GROUPS', key.stream)
  local whole = redis.call('XINFO', 'STREAM', key.stream)
  for i = 1, #whole, 2 do
    -- Not the first and the last entry: they may be of any size.
    if type(whole[i + 1]) ~= 'table' then
      info[#info + 1] = whole[i]
      info[#info + 1] = whole[i + 1]
    end
  end
  -- A user may lack this right, and not every server has the command.
  local usage = redis.pcall('MEMORY', 'USAGE', key.stream)
  if type(usage) == 'number' then bytes = usage end
end
for _, one in ipairs(groups) do
  local fields = {}
  for i = 1, #one, 2 do fields[one[i]] = one[i + 1] end
  if fields['name'] == arg.group then
    consumers = redis.call('XINFO', 'CONSUMERS', key.stream, arg.group)
    oldest = redis.call('XPENDING', key.stream, arg.group, '-', '+', 1)
    more = #redis.call('XRANGE', key.stream, '(' .. fields['last-delivered-id'], '+', 'COUNT', 1)
  end
end
return { 'OK', int(clock.now_ms()), length, bytes, info, groups, consumers, oldest, more,
  redis.call('HGETALL', key.fence), redis.call('HGETALL', key.route) }
