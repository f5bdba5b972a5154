-- The route of one shard: which layout it takes entries for, and where earlier layouts ended on it.
--
-- Its phase only moves up: closed for T < open at T < closed for T + 1. So a driver that slept through a resharding
-- finds every shard ahead of it. A layout id begins with its epoch: once the route's epoch is above it, nothing that
-- was routed by it can land here any more.
-- @include refuse
-- @include int
-- @include position
-- @error CORRUPT_METADATA
-- @error ROUTE_MISSING
local CUT = '^(%d+):(%d+%-%d+):([01])$'

-- Cuts are written `epoch:id:held`, with commas, oldest first; '-' for none.
local function parse_cuts(text, key)
  local cuts = {}
  for part in string.gmatch(text == '-' and '' or text, '[^,]+') do
    local epoch, id, held = string.match(part, CUT)
    if not epoch then refuse('CORRUPT_METADATA', 'cuts of ' .. key) end
    cuts[#cuts + 1] = { epoch = tonumber(epoch), id = id, held = held == '1' }
  end
  return cuts
end

local function format_cuts(cuts)
  local parts = {}
  for i, cut in ipairs(cuts) do parts[i] = int(cut.epoch) .. ':' .. cut.id .. ':' .. (cut.held and '1' or '0') end
  return #parts > 0 and table.concat(parts, ',') or '-'
end

-- Returns: { epoch, state, layout, cuts }; nil if there is none.
local function find(key)
  local values = redis.pcall('HMGET', key, 'epoch', 'state', 'layout', 'cuts')
  if values.err then refuse('CORRUPT_METADATA', key .. ' is not a hash') end
  if not values[1] and redis.call('EXISTS', key) == 0 then return nil end
  if not string.match(values[1] or '', '^%d+$') or (values[2] ~= 'open' and values[2] ~= 'closed') then
    refuse('CORRUPT_METADATA', key)
  end
  return { epoch = tonumber(values[1]), state = values[2], layout = values[3] or '-',
    cuts = parse_cuts(values[4] or '-', key) }
end

local function read(key)
  return find(key) or refuse('ROUTE_MISSING', key)
end

-- Below 0, 0 or above 0: where the route is, compared with a phase.
local function compare(route, epoch, state)
  if route.epoch ~= epoch then return route.epoch - epoch end
  if route.state == state then return 0 end
  return route.state == 'open' and 1 or -1
end

-- The id of the cut of an epoch, or nil.
local function cut_of(route, epoch)
  for _, cut in ipairs(route.cuts) do
    if cut.epoch == epoch then return cut.id end
  end
end

-- The id beyond which a group that has passed so far may not read yet; nil for none. Barriers of several reshardings
-- stack: the smallest counts.
local function barrier(route, passed)
  local lowest
  for _, cut in ipairs(route.cuts) do
    if cut.held and cut.epoch > passed and (not lowest or position.less(cut.id, lowest)) then lowest = cut.id end
  end
  return lowest
end

return { find = find, read = read, compare = compare, cut_of = cut_of, barrier = barrier, parse_cuts = parse_cuts,
  format_cuts = format_cuts }
