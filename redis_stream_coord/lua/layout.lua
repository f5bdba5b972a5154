-- The present layout of a stream, for producers and for peers that work on all of its shards.
-- @include layout
-- @key record
-- @arg protocol integer
-- @returns OK, version, incarnation, epoch, shards, routing, layout id, state, retention, groups
return layout.answer(layout.open(key.record, arg.protocol), key.record)
