-- A driver gives a resharding up before its decision, because its shards cannot be provisioned.
-- @include layout
-- @include saga
-- @key record
-- @arg protocol integer
-- @arg saga string
-- @arg epoch integer
-- @arg reason string
-- @returns OK
local record = layout.open(key.record, arg.protocol)
saga.abandon(key.record, record, saga.expect(record, arg, { 'PREPARING' }), arg.reason)
return { 'OK' }
