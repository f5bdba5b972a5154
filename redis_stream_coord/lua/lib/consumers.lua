-- Consumers that a consumer group still knows.

-- Delete those that are left behind. Looked at and deleted in one script: with a consumer go its pending entries.
local function tidy(stream, group, present)
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local consumer = {}
    for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
    if consumer['name'] ~= present and consumer['pending'] == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer['name'])
    end
  end
end

return { tidy = tidy }
