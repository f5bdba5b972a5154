-- Take a stream's record as it was planned on: of two operators who apply at once, one moves the version on, and the
-- other is told both.
-- @include int
-- @include layout
-- @include audit
-- @key record
-- @key audit
-- @key limits
-- @arg protocol integer
-- @arg expected integer   version that the plan was made of; 0: there was no record
-- @arg request_id string
-- @arg audit list         field, value, ... of the audit entry
-- @returns OK, version
-- @error REVISION_CONFLICT
local before = audit.begin(key.audit, key.limits, 'apply', arg)
if before then return { 'OK', before } end
local version = 0
if redis.call('EXISTS', key.record) == 1 then version = layout.open(key.record, arg.protocol).version end
if version ~= arg.expected then
  audit.deny(key.audit, 'apply', arg, 'REVISION_CONFLICT', 'stored ' .. int(version) .. ', planned on '
    .. int(arg.expected))
end
if version > 0 then
  version = version + 1
  redis.call('HSET', key.record, 'version', int(version))
end
audit.add(key.audit, 'apply', 'accepted', 'OK', int(version), arg)
return { 'OK', int(version) }
