-- Record what is repaired on other slots next.
-- @include audit
-- @key audit
-- @key limits
-- @arg action string
-- @arg detail string
-- @arg request_id string
-- @arg audit list   field, value, ... of the audit entry
-- @returns OK
if not audit.begin(key.audit, key.limits, arg.action, arg) then
  audit.add(key.audit, arg.action, 'accepted', 'OK', arg.detail, arg)
end
return { 'OK' }
