-- The correction round of a group whose record went backwards, as it stands in the record: '-' if there never was one;
-- `closed id=...` after the last one, so that who still names it is not taken for a witness of another rollback; else
-- `open id=... opened_ms=... due_ms=... strangers=0|1 waits=<member>,<member>,...`.
-- @include int
local OPEN = '^open id=([%w.]+) opened_ms=(%d+) due_ms=(%d+) strangers=([01]) waits=(%S+)$'

-- Returns: { open, id, opened_ms, due_ms, strangers, waits }, of which a closed one has only the first two, or nil.
local function parse(text)
  if text == '-' then return { open = false } end
  local closed = string.match(text, '^closed id=([%w.]+)$')
  if closed then return { open = false, id = closed } end
  local id, opened, due, strangers, list = string.match(text, OPEN)
  if not id then return nil end
  local waits = {}
  if list ~= '-' then
    for member in string.gmatch(list, '[^,]+') do waits[member] = true end
  end
  return { open = true, id = id, opened_ms = tonumber(opened), due_ms = tonumber(due), strangers = strangers == '1',
    waits = waits }
end

local function format(round)
  if not round.open then return round.id and 'closed id=' .. round.id or '-' end
  local order = {}
  for member in pairs(round.waits) do order[#order + 1] = member end
  table.sort(order)
  return 'open id=' .. round.id .. ' opened_ms=' .. int(round.opened_ms) .. ' due_ms=' .. int(round.due_ms)
    .. ' strangers=' .. (round.strangers and '1' or '0')
    .. ' waits=' .. (#order > 0 and table.concat(order, ',') or '-')
end

-- Nobody has to answer for this member any more: it is in step, or gone.
local function settle(round, id)
  if round.open and round.waits[id] then round.waits[id], round.dirty = nil, true end
end

-- Is it time to close it? Whoever is not in the record may have work in hand that nobody can wait for; a lease is what
-- such a session has at most.
local function over(round, lease_ms, now)
  return round.open and not next(round.waits) and (not round.strangers or now >= round.opened_ms + lease_ms)
end

return { parse = parse, format = format, settle = settle, over = over }
