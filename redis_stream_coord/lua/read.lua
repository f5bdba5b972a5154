-- Read a shard under its fence. First what is pending in the group beyond the last id received under this claim,
-- whoever's it was, in id order: a takeover reads from 0-0, and a lost reply loses nothing. Then new entries, none
-- beyond a barrier that the group has not passed: what is not read needs no care in a crash or a handoff.
-- @include refuse
-- @include counts
-- @include fence
-- @include position
-- @include consumers
-- @include route
-- @key stream
-- @key fence
-- @key route
-- @arg group string
-- @arg member string
-- @arg incarnation integer
-- @arg token integer
-- @arg nonce string
-- @arg after string        last id received under this claim; 0-0: none
-- @arg count integer       at most so many entries
-- @arg max_bytes integer   and so many bytes, unless the first alone has more
-- @arg each integer        1: this owner writes each delivery down
-- @returns OK, highest id seen or '', 1 if nothing is pending beyond it, id to wait beyond or '', position if the group
--   was made anew or '', ids of pending entries that exist no more, 1 if a barrier is reached, how many of the entries
--   were pending before, then of each entry: id, deliveries, fields
-- @error STREAM_MISSING
local stored = fence.check(key.fence, arg)
local limit = route.barrier(route.read(key.route), stored.passed)
if redis.call('EXISTS', key.stream) == 0 then refuse('STREAM_MISSING', key.stream) end
local recreated, gone, entries, deliveries, last, bytes = '', {}, {}, {}, '', 0
local presumed = arg.after == '0-0' and counts.presumed(key.fence, arg.token)
local page = redis.pcall('XPENDING', key.stream, arg.group, '(' .. arg.after, '+', arg.count + 1)
if page.err and string.find(page.err, 'NOGROUP', 1, true) then
  -- At 0 everything would come again, at $ entries would be lost.
  if not string.match(stored.position, '^%d+%-%d+$') then refuse('CORRUPT_METADATA', 'position in ' .. key.fence) end
  redis.call('XGROUP', 'CREATE', key.stream, arg.group, stored.position)
  page, recreated = {}, stored.position
elseif page.err then
  return page
end
local caught_up = #page <= arg.count
if not caught_up then page[#page] = nil end
counts.mark(key.fence, arg.token, arg.each == 1)

-- Is there room for one more entry? The first one always has: it could never be read otherwise.
local function fits(entry)
  local size = 0
  for _, value in ipairs(entry[2]) do size = size + #value end
  if #entries > 0 and bytes + size > arg.max_bytes then return false end
  bytes = bytes + size
  return true
end

local claim = { 'XCLAIM', key.stream, arg.group, arg.member, 0 }
for i, row in ipairs(page) do
  local entry = redis.call('XRANGE', key.stream, row[1], row[1])[1]
  if entry and not fits(entry) then
    caught_up = false
    break
  end
  last, claim[#claim + 1] = row[1], row[1]
  if entry then
    entries[#entries + 1], deliveries[#entries + 1] = entry, row[4] + (i == 1 and presumed and 1 or 0)
  else
    redis.call('XACK', key.stream, arg.group, row[1])
    gone[#gone + 1] = row[1]
  end
end
local again = #entries
if #claim > 5 then
  claim[#claim + 1] = 'JUSTID' -- leaves the delivery counts alone
  redis.call(unpack(claim))
  if entries[1] and presumed and entries[1][1] == page[1][1] then
    redis.call('XCLAIM', key.stream, arg.group, arg.member, 0, page[1][1], 'RETRYCOUNT', deliveries[1], 'JUSTID')
  end
end

local wait_after, held = '', 0
if caught_up then
  -- Look before reading: what has been read is pending, and could not be put back. A few at first, then twice as many
  -- each time: no more than about twice what fits is fetched, however large the entries are.
  local delivered, room, want, size, more = position.last_delivered(key.stream, arg.group), 0, arg.count - #page, 4, nil
  while more == nil do
    local chunk = redis.call('XRANGE', key.stream, '(' .. delivered, limit or '+', 'COUNT',
      math.min(size, want - room + 1))
    if #chunk < math.min(size, want - room + 1) then more = false end
    for _, entry in ipairs(chunk) do
      if room == want or not fits(entry) then
        more = true
        break
      end
      entries[#entries + 1], deliveries[#entries + 1], room, delivered = entry, 1, room + 1, entry[1]
    end
    size = size * 2
  end
  if room > 0 then
    redis.call('XREADGROUP', 'GROUP', arg.group, arg.member, 'COUNT', room, 'STREAMS', key.stream, '>')
    last = delivered
  end
  if not more then wait_after, held = delivered, limit and 1 or 0 end
  -- At the end of a takeover.
  if arg.after == '0-0' or #page > 0 then consumers.tidy(key.stream, arg.group, arg.member) end
end

local reply = { 'OK', last, caught_up and 1 or 0, wait_after, recreated, gone, held, again }
for i, entry in ipairs(entries) do
  reply[#reply + 1] = entry[1]
  reply[#reply + 1] = deliveries[i]
  reply[#reply + 1] = entry[2]
end
return reply
