-- Everything that is stored of a group, checked. Writes nothing.
-- @include clock
-- @include int
-- @include group
-- @key metadata
-- @key leases
-- @returns OK, now, the hash as a flat list, the leases as a flat list
group.complete(group.open(key.metadata))
return { 'OK', int(clock.now_ms()), redis.call('HGETALL', key.metadata),
  redis.call('ZRANGE', key.leases, 0, -1, 'WITHSCORES') }
