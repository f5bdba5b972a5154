-- Put the record of a stream back as a backup has it. Refused if the stored one has seen more; routes are asked before.
-- @include int
-- @include backup
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
local record = backup.take(arg)
local before = audit.begin(key.audit, key.limits, 'restore', arg)
if before then return { 'OK', before } end
local why = backup.ahead(key.record, arg)
if why then audit.deny(key.audit, 'restore', arg, 'BACKUP_BEHIND', why) end
backup.put(key.record, record, arg)
audit.add(key.audit, 'restore', 'accepted', 'OK', int(arg.version + 1), arg)
return { 'OK', int(arg.version + 1) }
