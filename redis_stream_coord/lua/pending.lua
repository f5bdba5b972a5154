-- To whom entries of a shard are delivered and not acknowledged, for people. Writes nothing.
-- @key stream
-- @arg group string
-- @arg ids list
-- @returns OK, then of each that is pending: id, consumer, idle ms, deliveries
local reply = { 'OK' }
for _, id in ipairs(arg.ids) do
  local page = redis.pcall('XPENDING', key.stream, arg.group, id, id, 1)
  -- Without the stream or its group nothing is delivered.
  if page.err and not string.find(page.err, 'NOGROUP', 1, true) then return page end
  if page[1] then reply[#reply + 1] = page[1] end
end
return reply
