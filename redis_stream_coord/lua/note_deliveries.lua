-- Write down which delivery of pending entries comes next, so that the counts outlive the process, and a poison entry
-- is recognised by its next owner too.
-- @include counts
-- @include fence
-- @key stream
-- @key fence
-- @arg group string
-- @arg member string
-- @arg incarnation integer
-- @arg token integer
-- @arg nonce string
-- @arg all_known integer   1: the counts of all pending entries are right now; a takeover need not presume anything
-- @arg counts list         id, count of each entry
-- @returns OK
fence.check(key.fence, arg)
for i = 1, #arg.counts, 2 do
  -- What is pending no more is left alone. JUSTID does not count up by itself; the idle time starts anew, which nothing
  -- here looks at.
  redis.call('XCLAIM', key.stream, arg.group, arg.member, 0, arg.counts[i], 'RETRYCOUNT', arg.counts[i + 1], 'JUSTID')
end
if arg.all_known == 1 then counts.mark(key.fence, arg.token, true) end
return { 'OK' }
