-- Freeze a group, or end that: an operator is at work. Nobody is granted anything, and no mutation but restore and
-- repair is accepted; a resharding that is not decided waits (`readable`). Members keep what they have.
-- @include clock
-- @include int
-- @include group
-- @include events
-- @include audit
-- @key metadata
-- @key events
-- @key audit
-- @key limits
-- @arg action string    freeze or unfreeze
-- @arg request_id string
-- @arg audit list       field, value, ... of the audit entry
-- @returns OK, since when it is frozen in Redis server ms, or 0
local before = audit.begin(key.audit, key.limits, arg.action, arg)
if before then return { 'OK', before } end
local g, now = group.open(key.metadata), clock.now_ms()
local frozen = arg.action == 'freeze' and (g.frozen or now)
if frozen ~= g.frozen then
  g.frozen = frozen
  -- What was held back is granted by whoever comes next.
  if not frozen then g.next_due_ms = math.min(g.next_due_ms, now) end
  group.save(g)
  if frozen then
    events.add(key.events, 'group_frozen', {}, { '*' })
  else
    events.add(key.events, 'group_unfrozen', {}, { '*' })
  end
end
audit.add(key.audit, arg.action, 'accepted', 'OK', int(frozen or 0), arg)
return { 'OK', int(frozen or 0) }
