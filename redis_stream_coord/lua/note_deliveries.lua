-- Write down how often an entry has been delivered, after its handler failed. So the count outlives the process, and a
-- poison entry is recognised by its next owner too.
-- @include fence
-- @key stream
-- @key fence
-- @arg group string
-- @arg member string
-- @arg incarnation integer
-- @arg token integer
-- @arg nonce string
-- @arg id string
-- @arg deliveries integer
-- @arg if_first integer   1: only if nothing before it is pending
-- @returns OK
fence.check(key.fence, arg)
if arg.if_first == 1 and redis.call('XPENDING', key.stream, arg.group)[2] ~= arg.id then return { 'OK' } end
-- JUSTID does not count up by itself; the idle time starts anew, which nothing here looks at.
redis.call('XCLAIM', key.stream, arg.group, arg.member, 0, arg.id, 'RETRYCOUNT', arg.deliveries, 'JUSTID')
return { 'OK' }
