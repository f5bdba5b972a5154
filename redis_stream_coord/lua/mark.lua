-- Note what a group has done for a resharding. It counts only for the registration that the driver has seen: a group
-- that was created anew meanwhile has yet to do it.
-- @include layout
-- @include saga
-- @key record
-- @arg protocol integer
-- @arg saga string
-- @arg epoch integer
-- @arg group string
-- @arg registered integer    its registration, as the driver read it
-- @arg incarnation integer   that it was done for
-- @arg what string           prepared, passed or drained
-- @returns OK, 1 if it counts
local record = layout.open(key.record, arg.protocol)
local s
if arg.what == 'prepared' then
  s = saga.expect(record, arg, { 'PREPARING' })
elseif arg.what == 'passed' then
  -- Before the decision where no entry comes in until all is consumed.
  s = saga.expect(record, arg, { 'DRAINING', 'CUTOVER' })
else
  s = saga.expect(record, arg, { 'DRAINING', 'REOPENING' })
end
local g = saga.groups(key.record)[arg.group]
if not g or g.registered ~= arg.registered or arg.incarnation < g.incarnation then return { 'OK', 0 } end
g[arg.what], g.incarnation = math.max(g[arg.what], s.epoch), arg.incarnation
saga.save(key.record, record, s, 'group:' .. arg.group, saga.format_group(g))
return { 'OK', 1 }
