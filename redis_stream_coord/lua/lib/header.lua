-- Read a fixed set of fields of a hash, strictly: what is missing or unreadable is refused, never guessed.
-- @include refuse
-- @error CORRUPT_METADATA
-- @error UNSUPPORTED_SCHEMA
local SCHEMA = '1'

-- Parameters: key; names of text fields; names of whole-number fields; word to refuse with if the key is not there.
-- Returns: table name -> string or number.
local function read(key, texts, numbers, absent)
  local names = {}
  for _, name in ipairs(texts) do names[#names + 1] = name end
  for _, name in ipairs(numbers) do names[#names + 1] = name end
  local values = redis.pcall('HMGET', key, unpack(names))
  if values.err then refuse('CORRUPT_METADATA', key .. ' is not a hash') end
  local found, fields = false, {}
  for i = 1, #names do
    found = found or values[i]
    fields[names[i]] = values[i]
  end
  if not found and redis.call('EXISTS', key) == 0 then refuse(absent) end
  if fields.schema and string.match(fields.schema, '^%d+$') and fields.schema ~= SCHEMA then
    refuse('UNSUPPORTED_SCHEMA', fields.schema)
  end
  if fields.schema ~= SCHEMA then refuse('CORRUPT_METADATA', 'schema') end
  for _, name in ipairs(texts) do
    if not fields[name] or fields[name] == '' then refuse('CORRUPT_METADATA', name) end
  end
  for _, name in ipairs(numbers) do
    if not fields[name] or not string.match(fields[name], '^%d+$') then refuse('CORRUPT_METADATA', name) end
    fields[name] = tonumber(fields[name])
  end
  return fields
end

return { SCHEMA = SCHEMA, read = read }
