-- Move a resharding on, if all that its state waits for is there: to the cut-over when every registered group is
-- prepared, to its end when every registered group has passed the barrier and drained the removed shards. And note that
-- the routes of the present layout are open.
-- @include refuse
-- @include layout
-- @include saga
-- @key record
-- @arg protocol integer
-- @arg saga string
-- @arg epoch integer
-- @arg state string   CUTOVER, COMPLETED, ABANDONED, or OPENED for the note
-- @returns OK, state
-- @error NOT_READY
local record = layout.open(key.record, arg.protocol)
local lacks = nil

local function need(s, what)
  local group = saga.lacking(key.record, s, what)
  lacks = lacks or (group and 'group ' .. group .. ' has not ' .. what)
end

local s
if arg.state == 'OPENED' then
  s = saga.expect(record, arg, { 'PREPARING', 'DRAINING', 'REOPENING' })
  s.opened = true
elseif arg.state == 'CUTOVER' then
  s = saga.expect(record, arg, { 'PREPARING' })
  need(s, 'prepared')
  s.state = 'CUTOVER'
else
  s = saga.expect(record, arg, { arg.state == 'COMPLETED' and 'DRAINING' or 'REOPENING' })
  lacks = not s.opened and 'routes are not open' or nil
  if arg.state == 'COMPLETED' and record.barriers ~= '-' then need(s, 'passed') end
  need(s, 'drained')
  s.state = arg.state
  if arg.state == 'ABANDONED' and s.reason ~= 'rolled back' then s.state = 'FAILED' end
end
if lacks then refuse('NOT_READY', lacks) end
if s.state == 'COMPLETED' then
  saga.forget_cuts(key.record)
  saga.save(key.record, record, s, 'barriers', '-')
else
  saga.save(key.record, record, s)
end
return { 'OK', s.state }
