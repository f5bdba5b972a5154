-- Do what time has brought about, as the next heartbeat of any member would, where nobody sends one: expire members,
-- fence those that did not drain, compute the target, grant. Whoever is overdue is expired, also right after Redis was
-- away: an operator asks for it, and whoever is alive after all joins again.
-- @include clock
-- @include int
-- @include group
-- @include leases
-- @include rebalance
-- @include events
-- @include audit
-- @key metadata
-- @key leases
-- @key events
-- @key audit
-- @key limits
-- @arg request_id string
-- @arg audit list   field, value, ... of the audit entry
-- @returns OK, types of the events that came of it, with spaces
-- @error FROZEN
local before = audit.begin(key.audit, key.limits, 'reconcile', arg)
if before then return { 'OK', before } end
local g, now = group.open(key.metadata), clock.now_ms()
if g.frozen then audit.deny(key.audit, 'reconcile', arg, 'FROZEN', int(g.frozen)) end
local live, log = leases.look(key.leases, g, now), rebalance.journal()
live.away = false
group.complete(g)
leases.settle(live, g, now)
rebalance.housekeep(g, log, live, now)
group.save(g)
leases.save(live)
local types = {}
for i, event in ipairs(log.events) do
  types[i] = event.type
  events.add(key.events, event.type, event.fields, i == #log.events and { '*' } or nil)
end
local done = table.concat(types, ' ')
audit.add(key.audit, 'reconcile', 'accepted', 'OK', done, arg)
return { 'OK', done }
