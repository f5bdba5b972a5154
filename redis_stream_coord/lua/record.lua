-- Record an administrative action on a group that is carried out on other slots next.
-- @include group
-- @include audit
-- @include int
-- @key metadata
-- @key audit
-- @key limits
-- @arg action string
-- @arg detail string
-- @arg request_id string
-- @arg audit list   field, value, ... of the audit entry
-- @returns OK, 1 if this request was recorded before
-- @error FROZEN
if audit.begin(key.audit, key.limits, arg.action, arg) then return { 'OK', 1 } end
local g = group.open(key.metadata)
if g.frozen then audit.deny(key.audit, arg.action, arg, 'FROZEN', int(g.frozen)) end
audit.add(key.audit, arg.action, 'accepted', 'OK', arg.detail, arg)
return { 'OK', 0 }
