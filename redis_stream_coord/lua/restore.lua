-- Put the record of a group back as a backup has it: the deciding write of a restore. Refused if anything in its slot
-- has seen more than the backup knows; the shards are asked before.
-- @include int
-- @include backup
-- @include events
-- @include audit
-- @key metadata
-- @key leases
-- @key events
-- @key audit
-- @key limits
-- @key deleted
-- @arg incarnation integer  of the backup
-- @arg version integer      of the backup
-- @arg last_event string    id of the newest event when it was made
-- @arg request_id string
-- @arg fields integer       so many values of the rest are the record: field, value, ...
-- @arg audit list           the record, then field, value, ... of the audit entry
-- @returns OK, version
-- @error BACKUP_BEHIND
local record = backup.take(arg)
local before = audit.begin(key.audit, key.limits, 'restore', arg)
if before then return { 'OK', before } end

-- Whoever has seen more than the backup, in words; nil if nobody has.
local function witness()
  local stored = backup.ahead(key.metadata, arg)
  if stored then return stored end
  local deleted = tonumber(redis.call('HGET', key.deleted, 'incarnation') or '0')
  if deleted >= arg.incarnation then return 'incarnation ' .. int(deleted) .. ' was deleted' end
  for _, event in ipairs(redis.call('XRANGE', key.events, '(' .. arg.last_event, '+')) do
    local fields = {}
    for i = 1, #event[2], 2 do fields[event[2][i]] = event[2][i + 1] end
    local type, seen = fields['type'], tonumber(fields['seen_version'] or '0')
    if seen > arg.version then return 'member ' .. (fields['member'] or '') .. ' has seen version ' .. int(seen) end
    if string.match(type, '^member_') or string.match(type, '^shard_') or type == 'target_changed' then
      return 'event ' .. event[1] .. ' ' .. type
    end
  end
end

local why, frozen = witness(), redis.pcall('HMGET', key.metadata, 'frozen')[1]
if why then audit.deny(key.audit, 'restore', arg, 'BACKUP_BEHIND', why) end
backup.put(key.metadata, record, arg)
redis.call('DEL', key.leases)
-- A round belongs to the time before. Whoever is at work goes on being so.
redis.call('HSET', key.metadata, 'round', '-', 'frozen', frozen or '-')
events.add(key.events, 'group_restored', { 'version', int(arg.version + 1) }, { '*' })
audit.add(key.audit, 'restore', 'accepted', 'OK', int(arg.version + 1), arg)
return { 'OK', int(arg.version + 1) }
