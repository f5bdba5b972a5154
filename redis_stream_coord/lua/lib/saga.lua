-- The resharding that is under way on a stream, or was the last one; and what its groups have done for it. Every write
-- compares its id, its epoch and its state: a driver that is late changes nothing.
-- @include refuse
-- @include int
-- @include clock
-- @include layout
-- @include route
-- @error CORRUPT_METADATA
-- @error MOVED_ON
local GROUP = '^registered=(%d+) incarnation=(%d+) since=(%d+) prepared=(%d+) passed=(%d+) drained=(%d+)$'
local ACTIVE = { PREPARING = true, CUTOVER = true, DRAINING = true, REOPENING = true }

-- Parameters: record: as `layout.open` gives it. Returns: the saga, or nil if there never was one.
local function parse(record)
  if record.saga == '-' then return nil end
  local id, state, epoch, from, to, ordered, quiesce, back, opened, void, began, changed, reason = string.match(
    record.saga, layout.SAGA)
  return { id = id, state = state, epoch = tonumber(epoch), from = tonumber(from), to = tonumber(to),
    ordered = ordered == '1', quiesce = quiesce == '1', back = back == '1',
    opened = opened == '1', void = tonumber(void), began_ms = tonumber(began), changed_ms = tonumber(changed),
    reason = reason, active = ACTIVE[state] or false }
end

local function format(s)
  local function flag(value) return value and '1' or '0' end
  return 'id=' .. s.id .. ' state=' .. s.state .. ' epoch=' .. int(s.epoch) .. ' from=' .. int(s.from) .. ' to='
    .. int(s.to) .. ' ordered=' .. flag(s.ordered) .. ' quiesce=' .. flag(s.quiesce) .. ' back='
    .. flag(s.back) .. ' opened=' .. flag(s.opened) .. ' void=' .. int(s.void) .. ' began_ms=' .. int(s.began_ms)
    .. ' changed_ms=' .. int(s.changed_ms) .. ' reason=' .. s.reason
end

-- The saga, if it is the one that the caller means, in one of the states that fit.
local function expect(record, arg, states)
  local s = parse(record)
  for _, state in ipairs(states) do
    if s and s.id == arg.saga and s.epoch == arg.epoch and s.state == state then return s end
  end
  refuse('MOVED_ON', s and (s.state .. ' at epoch ' .. int(s.epoch)) or 'there is none')
end

-- Write the saga, and other fields given as a flat list, under the next version of the record.
local function save(key, record, s, ...)
  s.changed_ms = clock.now_ms()
  record.saga, record.version = format(s), record.version + 1
  redis.call('HSET', key, 'saga', record.saga, 'version', int(record.version), ...)
end

-- The next epoch, never below the server's clock: what was drawn in a time that Redis has lost, with the record's own
-- memory of it, may still be on the way, or believed by a driver that slept.
local function draw(record)
  record.drawn = math.max(record.drawn + 1, clock.now_ms())
  return record.drawn
end

-- Group name -> what it has done; of each registered group.
local function groups(key)
  local fields, found = redis.call('HGETALL', key), {}
  for i = 1, #fields, 2 do
    local name = string.match(fields[i], '^group:(.+)$')
    if name then
      local registered, incarnation, since, prepared, passed, drained = string.match(fields[i + 1], GROUP)
      if not registered then refuse('CORRUPT_METADATA', fields[i] .. ' of the stream record') end
      found[name] = { registered = tonumber(registered), incarnation = tonumber(incarnation), since = tonumber(since),
        prepared = tonumber(prepared), passed = tonumber(passed), drained = tonumber(drained) }
    end
  end
  return found
end

local function format_group(g)
  return 'registered=' .. int(g.registered) .. ' incarnation=' .. int(g.incarnation) .. ' since=' .. int(g.since)
    .. ' prepared=' .. int(g.prepared) .. ' passed=' .. int(g.passed) .. ' drained=' .. int(g.drained)
end

-- The first group, by name, that has not done something for this saga; nil if all have.
local function lacking(key, s, what)
  local first
  for name, g in pairs(groups(key)) do
    if g[what] < s.epoch and (not first or name < first) then first = name end
  end
  return first
end

-- Whether entries beyond the cut of a shard wait for other shards: keys move to the added ones on the way out, to the
-- remaining ones on the way in. Nothing waits where all was consumed while the shards were closed.
local function holds(s, shard)
  if not s.ordered or s.quiesce then return false end
  if s.to > s.from then return shard >= s.from and shard < s.to end
  return shard < s.to
end

-- Forget all cuts: nobody waits at any of them.
local function forget_cuts(key)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.find(field, '^cuts:') then redis.call('HDEL', key, field) end
  end
  redis.call('HSET', key, 'cuts_count', '0')
end

-- Give up before the decision. From the cut-over it is a deciding write of its own, under a fresh epoch: merely opening
-- the old routes again would race with a driver that rolls forward. Before it no route has been touched.
local function abandon(key, record, s, reason)
  local epoch, fields = draw(record), {}
  if s.state == 'CUTOVER' then
    fields = { 'epoch', int(epoch), 'layout', layout.id(epoch, s.from, s.id), 'earlier',
      layout.ended(record, clock.now_ms()) }
    s.void, s.opened = s.epoch, false
    forget_cuts(key)
  end
  s.state, s.epoch, s.reason = 'REOPENING', epoch, reason
  save(key, record, s, 'drawn', int(epoch), unpack(fields))
end

return { parse = parse, draw = draw, holds = holds, expect = expect, save = save, groups = groups,
  format_group = format_group, lacking = lacking, forget_cuts = forget_cuts, abandon = abandon }
