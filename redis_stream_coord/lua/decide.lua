-- The deciding write of a resharding: from here on the new layout is the stream's. Only with a cut of every shard of
-- both layouts, and while every registered group is prepared.
-- @include refuse
-- @include int
-- @include clock
-- @include layout
-- @include saga
-- @include route
-- @key record
-- @arg protocol integer
-- @arg saga string
-- @arg epoch integer
-- @returns OK, layout id
-- @error NOT_READY
local record = layout.open(key.record, arg.protocol)
local s = saga.expect(record, arg, { 'CUTOVER' })
local lacking = saga.lacking(key.record, s, 'prepared')
if lacking then refuse('NOT_READY', 'group ' .. lacking .. ' is not prepared') end
lacking = s.quiesce and saga.lacking(key.record, s, 'passed')
if lacking then refuse('NOT_READY', 'group ' .. lacking .. ' has not consumed all') end
for shard = 0, math.max(s.from, s.to) - 1 do
  local cuts = route.parse_cuts(redis.call('HGET', key.record, 'cuts:' .. int(shard)) or '-', key.record)
  if not route.cut_of({ cuts = cuts }, s.epoch) then refuse('NOT_READY', 'no cut of shard ' .. int(shard)) end
end
local barriers = record.barriers
if s.ordered and not s.quiesce then
  local own = int(s.epoch) .. ':' .. int(s.from) .. ':' .. int(s.to)
  barriers = barriers == '-' and own or barriers .. ',' .. own
end
local id = layout.id(s.epoch, s.to, s.id)
s.state, s.opened = 'DRAINING', false
saga.save(key.record, record, s, 'shards', int(s.to), 'epoch', int(s.epoch), 'layout', id, 'barriers', barriers,
  'earlier', layout.ended(record, clock.now_ms()))
return { 'OK', id }
