-- The deletion of a group is finished on all its shards: from now on it may be created anew.
-- @key deleted
-- @arg incarnation integer   of the lifecycle that was deleted
-- @include int
-- @returns OK
if redis.call('GET', key.deleted) == int(arg.incarnation) .. ' unfinished' then
  redis.call('SET', key.deleted, int(arg.incarnation) .. ' done')
end
return { 'OK' }
