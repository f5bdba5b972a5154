-- Write down that a mutation ended with an error that no script of it has written down. Once it was decided, it is only
-- unfinished: the same request again finishes it. So is one that Redis may accept at the next try.
-- @include audit
-- @key audit
-- @arg action string
-- @arg word string       the error word, or -
-- @arg detail string
-- @arg final integer     1: the same request would end like this again
-- @arg request_id string
-- @arg audit list        field, value, ... of the audit entry
-- @returns OK, 1 if it was written down
local before = audit.find(key.audit, arg.action, arg.request_id)
if before and before['outcome'] ~= 'accepted' then return { 'OK', 0 } end
audit.add(key.audit, arg.action, arg.final == 1 and not before and 'failed' or 'unfinished', arg.word, arg.detail, arg)
return { 'OK', 1 }
