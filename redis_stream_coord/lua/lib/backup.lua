-- A record of a backup: how a script is given it, what speaks against it in the stored one, and how it is put back.
-- @include int

-- Take the record out of the list that carries it before the audit entry, and leave that there.
-- Parameters: arg: the script's arguments. Returns: the record as a flat list.
local function take(arg)
  local record, own = {}, {}
  for i, value in ipairs(arg.audit) do
    local list = i <= arg.fields and record or own
    list[#list + 1] = value
  end
  arg.audit = own
  return record
end

-- Parameters: key of the stored record, whatever that has become; arg: incarnation and version of the backup.
-- Returns: in words that it has seen more than the backup, or nil.
local function ahead(key, arg)
  local values = redis.pcall('HMGET', key, 'incarnation', 'version')
  local incarnation, version = tonumber(values[1] or ''), tonumber(values[2] or '')
  if incarnation and version and (incarnation > arg.incarnation
      or (incarnation == arg.incarnation and version > arg.version)) then
    return 'the stored record has incarnation ' .. int(incarnation) .. ' version ' .. int(version)
  end
end

-- Write the record in place of the stored one, under the next version.
local function put(key, record, arg)
  redis.call('DEL', key)
  for i = 1, #record, 2 do redis.call('HSET', key, record[i], record[i + 1]) end
  redis.call('HSET', key, 'version', int(arg.version + 1))
end

return { take = take, ahead = ahead, put = put }
