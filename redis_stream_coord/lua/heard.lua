-- What has happened since an event, as far as it concerns one member. Looked through here rather than there: in a
-- rebalance every member wakes for the events of all.
-- @key events
-- @arg after string    id of the last event that the member has heard of
-- @arg member string
-- @returns OK, id of the last event, 1 if the member has to come for an answer, 1 if it has to look at its shards: the
--   group was moved on them, or has passed a barrier
local last, concerned, sought = arg.after, 0, 0
local member = ' ' .. arg.member .. ' '
for _, event in ipairs(redis.call('XRANGE', key.events, '(' .. arg.after, '+', 'COUNT', 1000)) do
  last = event[1]
  for i = 1, #event[2], 2 do
    local name, value = event[2][i], event[2][i + 1]
    if name == 'wake' and (value == '*' or string.find(' ' .. value .. ' ', member, 1, true)) then concerned = 1 end
    if name == 'type' and (value == 'sought' or value == 'passed') then sought = 1 end
  end
end
return { 'OK', last, concerned, sought }
