-- A group is created, and all its shards are provisioned: if the stream is new, producers may begin. What an earlier
-- lifecycle of the group has done for a resharding counts no more.
-- @include refuse
-- @include int
-- @include layout
-- @include saga
-- @key record
-- @arg protocol integer
-- @arg layout string        the one that was provisioned
-- @arg group string
-- @arg incarnation integer
-- @returns OK, version, incarnation, epoch, shards, routing, layout id, state, retention, groups,
--   state of the resharding or -
-- @error BUSY
local record = layout.open(key.record, arg.protocol)
local s, g = saga.parse(record), saga.groups(key.record)[arg.group]
local anew = g and arg.incarnation > g.incarnation
if anew and s and s.state == 'CUTOVER' then refuse('BUSY', 'a resharding is at its cut-over') end
local ready = record.state == 'creating' and record.layout == arg.layout
if ready then record.state = 'active' end
if anew then
  g.incarnation, g.since, g.prepared, g.passed, g.drained = arg.incarnation, record.epoch, 0, 0, 0
end
if anew or ready then
  record.version = record.version + 1
  redis.call('HSET', key.record, 'state', record.state, 'version', int(record.version))
end
if anew then redis.call('HSET', key.record, 'group:' .. arg.group, saga.format_group(g)) end
return layout.answer(record, key.record)
