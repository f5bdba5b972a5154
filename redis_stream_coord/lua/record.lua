-- Record an administrative action on a group that is carried out on other slots next.
-- @include group
-- @include audit
-- @key metadata
-- @key audit
-- @arg action string
-- @arg detail string
-- @arg request_id string
-- @arg audit list   field, value, ... of the audit entry
-- @returns OK, 1 if this request was recorded before
group.open(key.metadata)
if audit.find(key.audit, arg.action, arg.request_id) then return { 'OK', 1 } end
audit.add(key.audit, arg.action, 'accepted', 'OK', arg.detail, arg)
return { 'OK', 0 }
