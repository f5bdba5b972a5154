-- Change how long the entries of a stream are kept.
-- @include int
-- @include layout
-- @include audit
-- @key record
-- @key audit
-- @key limits
-- @arg protocol integer
-- @arg retention string   all, consumed, or keep:<count>
-- @arg request_id string
-- @arg audit list         field, value, ... of the audit entry
-- @returns OK, version, incarnation, epoch, shards, routing, layout id, state, retention, groups,
--   state of the resharding or -
local before = audit.begin(key.audit, key.limits, 'retain', arg)
local record = layout.open(key.record, arg.protocol)
if not before then
  if record.retention ~= arg.retention then
    record.retention, record.version = arg.retention, record.version + 1
    redis.call('HSET', key.record, 'retention', record.retention, 'version', int(record.version))
  end
  audit.add(key.audit, 'retain', 'accepted', 'OK', arg.retention, arg)
end
return layout.answer(record, key.record)
