-- Make a group known to its stream; the first group makes the stream's record. Its shards are provisioned next; until
-- then the record says `creating` and producers wait.
-- @include clock
-- @include refuse
-- @include int
-- @include header
-- @include layout
-- @include saga
-- @key record
-- @arg stream string
-- @arg group string
-- @arg shards integer      -1: as many as there are
-- @arg routing string      for a new stream
-- @arg retention string    for a new stream
-- @arg protocol integer
-- @returns OK, version, incarnation, epoch, shards, routing, layout id, state, retention, groups,
--   state of the resharding or -
-- @error BUSY
-- @error SHARD_COUNT_MISMATCH
-- @error SHARDS_REQUIRED
if redis.call('EXISTS', key.record) == 0 then
  if arg.shards < 0 then refuse('SHARDS_REQUIRED') end
  -- No epoch is drawn twice, not by a record that is made anew either: fences remember which they have passed.
  local incarnation, drawn = int(clock.now_us()), int(clock.now_ms())
  redis.call('HSET', key.record, 'schema', header.SCHEMA, 'stream', arg.stream, 'protocol_min', int(arg.protocol),
    'protocol_max', int(arg.protocol), 'incarnation', incarnation, 'version', '0', 'epoch', '1', 'shards',
    int(arg.shards), 'routing', arg.routing, 'layout', '1:' .. int(arg.shards) .. ':' .. incarnation, 'state',
    'creating', 'earlier', '-', 'retention', arg.retention, 'group_count', '0', 'saga', '-', 'barriers', '-', 'drawn',
    drawn, 'top', int(arg.shards), 'cuts_count', '0')
end
local record = layout.open(key.record, arg.protocol)
if arg.shards >= 0 and arg.shards ~= record.shards then
  refuse('SHARD_COUNT_MISMATCH', 'stored ' .. int(record.shards) .. ', asked for ' .. int(arg.shards))
end
-- A group that came now would miss either layout.
local s = saga.parse(record)
if s and s.state == 'CUTOVER' then refuse('BUSY', 'a resharding is at its cut-over') end
local field = 'group:' .. arg.group
local known = saga.groups(key.record)[arg.group]
local g = known or { incarnation = 0, since = record.epoch, passed = 0, drained = 0, prepared = 0 }
if not known or (s and s.active) then
  -- Registered again it may be about to be created anew: what was prepared for it counts no more.
  record.version = record.version + 1
  g.registered, g.prepared = record.version, 0
  redis.call('HSET', key.record, 'version', int(record.version), field, saga.format_group(g), 'group_count',
    int(record.group_count + (known and 0 or 1)))
end
return layout.answer(record, key.record)
