-- Before the first step of a mutation: has this request been decided already, and may its principal ask at all?
-- @include audit
-- @key audit
-- @key limits
-- @arg action string
-- @arg request_id string
-- @arg audit list   field, value, ... of the audit entry
-- @returns OK, 1 if it was accepted before, the recorded detail or ''
local before = audit.begin(key.audit, key.limits, arg.action, arg)
return { 'OK', before and 1 or 0, before or '' }
