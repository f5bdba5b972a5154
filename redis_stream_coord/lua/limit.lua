-- Change how many mutations a principal may ask for.
-- @include audit
-- @key audit
-- @key limits
-- @arg principal string   a Redis user, or * for everybody without a limit of its own
-- @arg limit string       count/seconds, or - for none of its own
-- @arg request_id string
-- @arg audit list         field, value, ... of the audit entry
-- @returns OK
if not audit.begin(key.audit, key.limits, 'limit', arg) then
  if arg.limit == '-' then
    redis.call('HDEL', key.limits, arg.principal)
  else
    redis.call('HSET', key.limits, arg.principal, arg.limit)
  end
  audit.add(key.audit, 'limit', 'accepted', 'OK', arg.principal .. ' ' .. arg.limit, arg)
end
return { 'OK' }
