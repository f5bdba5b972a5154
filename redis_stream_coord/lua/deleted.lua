-- The deletion of a group is finished on all its shards: from now on it may be created anew.
-- @key deleted
-- @arg incarnation integer   of the lifecycle that was deleted
-- @include int
-- @returns OK
if redis.call('HGET', key.deleted, 'incarnation') == int(arg.incarnation) then
  redis.call('HSET', key.deleted, 'state', 'done')
end
return { 'OK' }
