-- Put the record of a stream back as a backup has it. Refused if the stored one has seen more; routes are asked before.
-- @include int
-- @include audit
-- @key record
-- @key audit
-- @key limits
-- @arg incarnation integer  of the backup
-- @arg version integer      of the backup
-- @arg request_id string
-- @arg fields integer       so many values of the rest are the record: field, value, ...
-- @arg audit list           the record, then field, value, ... of the audit entry
-- @returns OK, version
-- @error BACKUP_BEHIND
local rest, record = arg.audit, {}
arg.audit = {}
for i, value in ipairs(rest) do
  local list = i <= arg.fields and record or arg.audit
  list[#list + 1] = value
end
local before = audit.begin(key.audit, key.limits, 'restore', arg)
if before then return { 'OK', before } end
local values = redis.pcall('HMGET', key.record, 'incarnation', 'version')
local incarnation, version = tonumber(values[1] or ''), tonumber(values[2] or '')
if incarnation and version and (incarnation > arg.incarnation
    or (incarnation == arg.incarnation and version > arg.version)) then
  audit.deny(key.audit, 'restore', arg, 'BACKUP_BEHIND', 'the stored record has incarnation ' .. int(incarnation)
    .. ' version ' .. int(version))
end
redis.call('DEL', key.record)
for i = 1, #record, 2 do redis.call('HSET', key.record, record[i], record[i + 1]) end
redis.call('HSET', key.record, 'version', int(arg.version + 1))
audit.add(key.audit, 'restore', 'accepted', 'OK', int(arg.version + 1), arg)
return { 'OK', int(arg.version + 1) }
