-- May the caller's user give these commands? Asked before the first script of a kind that writes with several: Redis
-- takes nothing back, so one that is refused in its midst would leave half of its work. Before 7.0 Redis cannot say,
-- and nothing is found.
-- @key metadata         names the slot; no key is touched
-- @arg commands list    of each: number of words, then the words
-- @returns OK, then the positions of those that are refused, from 1
local may, reply, at, position = redis.acl_check_cmd, { 'OK' }, 1, 0
while may and at < #arg.commands do
  local words = tonumber(arg.commands[at])
  position = position + 1
  if not may(unpack(arg.commands, at + 1, at + words)) then reply[#reply + 1] = position end
  at = at + 1 + words
end
return reply
