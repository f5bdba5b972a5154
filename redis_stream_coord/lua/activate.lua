-- All shards of a new stream are provisioned: producers may begin.
-- @include int
-- @include layout
-- @key record
-- @arg protocol integer
-- @arg layout string   the one that was provisioned
-- @returns OK, version, incarnation, epoch, shards, routing, layout id, state, retention, groups
local record = layout.open(key.record, arg.protocol)
if record.state == 'creating' and record.layout == arg.layout then
  record.state, record.version = 'active', record.version + 1
  redis.call('HSET', key.record, 'state', record.state, 'version', int(record.version))
end
return layout.answer(record, key.record)
