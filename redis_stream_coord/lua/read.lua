-- Read a shard under its fence. First what is pending in the group beyond the last id received under this claim,
-- whoever's it was, in id order: a takeover reads from 0-0, and a lost reply loses nothing. Then new entries.
-- @include refuse
-- @include fence
-- @include position
-- @key stream
-- @key fence
-- @arg group string
-- @arg member string
-- @arg incarnation integer
-- @arg token integer
-- @arg nonce string
-- @arg after string    last id received under this claim; 0-0: none
-- @arg count integer   at most so many entries
-- @returns OK, 1 if nothing is pending beyond these, id to wait beyond or '', position if the group was made anew or '',
--   ids of pending entries that exist no more, then id, deliveries, fields of each entry
-- @error STREAM_MISSING
local stored = fence.check(key.fence, arg)
if redis.call('EXISTS', key.stream) == 0 then refuse('STREAM_MISSING', key.stream) end
local recreated, gone, entries, deliveries = '', {}, {}, {}
local page = redis.pcall('XPENDING', key.stream, arg.group, '(' .. arg.after, '+', arg.count)
if page.err and string.find(page.err, 'NOGROUP', 1, true) then
  -- At 0 everything would come again, at $ entries would be lost.
  redis.call('XGROUP', 'CREATE', key.stream, arg.group, stored.position)
  page, recreated = {}, stored.position
elseif page.err then
  return page
end

if #page > 0 then
  local claim = { 'XCLAIM', key.stream, arg.group, arg.member, 0 }
  for _, row in ipairs(page) do claim[#claim + 1] = row[1] end
  -- JUSTID leaves the delivery counts alone: most of these were only prefetched and never handed to a handler.
  claim[#claim + 1] = 'JUSTID'
  redis.call(unpack(claim))
  if arg.after == '0-0' then
    -- The first one was, if any: the previous owner handled its shard in order.
    page[1][4] = page[1][4] + 1
    redis.call('XCLAIM', key.stream, arg.group, arg.member, 0, page[1][1], 'RETRYCOUNT', page[1][4], 'JUSTID')
  end
  for _, row in ipairs(page) do
    local entry = redis.call('XRANGE', key.stream, row[1], row[1])[1]
    if entry then
      entries[#entries + 1], deliveries[#entries + 1] = entry, row[4]
    else
      redis.call('XACK', key.stream, arg.group, row[1])
      gone[#gone + 1] = row[1]
    end
  end
end

local caught_up, wait_after = #page < arg.count, ''
if caught_up then
  local new = redis.call('XREADGROUP', 'GROUP', arg.group, arg.member, 'COUNT', arg.count - #page, 'STREAMS',
    key.stream, '>')
  for _, entry in ipairs(new and new[1] and new[1][2] or {}) do
    entries[#entries + 1], deliveries[#entries + 1] = entry, 1
  end
  if #entries + #gone < arg.count then wait_after = position.last_delivered(key.stream, arg.group) end
  -- Deleting a consumer throws its pending entries away, so only those without any; checked right here.
  for _, info in ipairs(arg.after == '0-0' and redis.call('XINFO', 'CONSUMERS', key.stream, arg.group) or {}) do
    local consumer = {}
    for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
    if consumer['name'] ~= arg.member and consumer['pending'] == 0 then
      redis.call('XGROUP', 'DELCONSUMER', key.stream, arg.group, consumer['name'])
    end
  end
end

local reply = { 'OK', caught_up and 1 or 0, wait_after, recreated, gone }
for i, entry in ipairs(entries) do
  reply[#reply + 1] = entry[1]
  reply[#reply + 1] = deliveries[i]
  reply[#reply + 1] = entry[2]
end
return reply
