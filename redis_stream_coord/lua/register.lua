-- Make a group known to its stream; the first group makes the stream's record. Its shards are provisioned next; until
-- then the record says `creating` and producers wait.
-- @include clock
-- @include refuse
-- @include int
-- @include header
-- @include layout
-- @key record
-- @arg stream string
-- @arg group string
-- @arg shards integer      -1: as many as there are
-- @arg routing string      for a new stream
-- @arg retention string    for a new stream
-- @arg protocol integer
-- @returns OK, version, incarnation, epoch, shards, routing, layout id, state, retention, groups
-- @error SHARD_COUNT_MISMATCH
-- @error SHARDS_REQUIRED
if redis.call('EXISTS', key.record) == 0 then
  if arg.shards < 0 then refuse('SHARDS_REQUIRED') end
  local incarnation = int(clock.now_us())
  redis.call('HSET', key.record, 'schema', header.SCHEMA, 'stream', arg.stream, 'protocol_min', int(arg.protocol),
    'protocol_max', int(arg.protocol), 'incarnation', incarnation, 'version', '0', 'epoch', '1', 'shards',
    int(arg.shards), 'routing', arg.routing, 'layout', '1:' .. int(arg.shards) .. ':' .. incarnation, 'state',
    'creating', 'earlier', '-', 'retention', arg.retention, 'group_count', '0')
end
local record = layout.open(key.record, arg.protocol)
if arg.shards >= 0 and arg.shards ~= record.shards then
  refuse('SHARD_COUNT_MISMATCH', 'stored ' .. int(record.shards) .. ', asked for ' .. int(arg.shards))
end
if redis.call('HSETNX', key.record, 'group:' .. arg.group, 'registered') == 1 then
  record.version = record.version + 1
  redis.call('HSET', key.record, 'version', int(record.version), 'group_count', int(record.group_count + 1))
end
return layout.answer(record, key.record)
