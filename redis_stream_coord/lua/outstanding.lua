-- Ids of what is pending on a shard, whoever has it: its owner looks whether Redis has lost an acknowledgement that it
-- had accepted. Without the entries, because nearly always the owner knows all of them. Writes nothing.
-- @include fence
-- @key stream
-- @key fence
-- @arg group string
-- @arg incarnation integer
-- @arg token integer
-- @arg nonce string
-- @arg after string    only ids beyond it
-- @arg count integer   at most so many
-- @returns OK, then ids in order
fence.check(key.fence, arg)
local page = redis.pcall('XPENDING', key.stream, arg.group, '(' .. arg.after, '+', arg.count)
-- Without the stream or its group nothing is pending; the read says so, or makes the group anew.
if page.err and not string.find(page.err, 'NOGROUP', 1, true) then return page end
local reply = { 'OK' }
for _, row in ipairs(page) do reply[#reply + 1] = row[1] end
return reply
