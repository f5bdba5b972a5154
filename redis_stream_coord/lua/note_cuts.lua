-- Note the cuts of closed shards. If a shard had to be closed again, because its route was lost, the larger id counts.
-- @include int
-- @include layout
-- @include saga
-- @include route
-- @include position
-- @key record
-- @arg protocol integer
-- @arg saga string
-- @arg epoch integer
-- @arg cuts list   shard, id, ...
-- @returns OK, number of shards with a cut of this epoch that were noted
local record = layout.open(key.record, arg.protocol)
local s, noted = saga.expect(record, arg, { 'CUTOVER', 'DRAINING' }), {}
for i = 1, #arg.cuts, 2 do
  local shard, field, cuts, own = tonumber(arg.cuts[i]), 'cuts:' .. arg.cuts[i], {}, nil
  local stored = redis.call('HGET', key.record, field)
  if not stored then record.cuts_count = record.cuts_count + 1 end
  for _, cut in ipairs(route.parse_cuts(stored or '-', key.record)) do
    if cut.epoch == s.epoch then own = cut end
    cuts[#cuts + 1] = cut
  end
  if not own then
    own = { epoch = s.epoch, id = arg.cuts[i + 1], held = saga.holds(s, shard) }
    cuts[#cuts + 1] = own
  elseif position.less(own.id, arg.cuts[i + 1]) then
    own.id = arg.cuts[i + 1]
  end
  noted[#noted + 1] = field
  noted[#noted + 1] = route.format_cuts(cuts)
end
saga.save(key.record, record, s, 'cuts_count', int(record.cuts_count), unpack(noted))
return { 'OK', #noted / 2 }
