-- The present layout of a stream, for producers and for peers that work on all of its shards.
-- @include clock
-- @include layout
-- @key record
-- @arg protocol integer
-- @arg window_ms integer   how long event ids are remembered
-- @returns OK, version, incarnation, epoch, shards, routing, layout id, state, retention, groups,
--   state of the resharding or -, ids of the layouts that ended within the window, oldest first
local record = layout.open(key.record, arg.protocol)
local answer = layout.answer(record, key.record)
answer[#answer + 1] = layout.ended_since(record, clock.now_ms() - arg.window_ms)
return answer
