-- Begin a resharding, under an epoch that was never used. One at a time; the same request again finds its own.
-- @include refuse
-- @include int
-- @include clock
-- @include layout
-- @include saga
-- @include audit
-- @key record
-- @key audit
-- @key limits
-- @arg protocol integer
-- @arg saga string         id of the new resharding: letters and digits
-- @arg shards integer      how many there shall be
-- @arg ordered integer     1: keep the order of keys across it
-- @arg quiesce integer     1: no entry comes in until every group has consumed all that is there
-- @arg request_id string
-- @arg audit list          field, value, ... of the audit entry
-- @returns OK, id of the resharding
-- @error BUSY
-- @error RESHARDING
-- @error SAME_SHARD_COUNT
-- @error ORDER_UNSUPPORTED
local before = audit.begin(key.audit, key.limits, 'scale', arg)
if before then return { 'OK', before } end
local record = layout.open(key.record, arg.protocol)
local last, now = saga.parse(record), clock.now_ms()

local function check()
  if record.state == 'creating' then return 'BUSY', 'the stream is still being created' end
  if last and last.active then
    return 'RESHARDING', last.state .. ' from ' .. int(last.from) .. ' to ' .. int(last.to)
  end
  if arg.shards == record.shards then return 'SAME_SHARD_COUNT', int(record.shards) end
  -- It moves keys between any two shards: every shard would have to wait for every other.
  if arg.ordered == 1 and arg.quiesce == 0 and record.routing ~= 'jump-v1' then
    return 'ORDER_UNSUPPORTED', record.routing
  end
end

local word, detail = check()
-- Not final: the same request is accepted a moment later.
if word == 'BUSY' then refuse(word, detail) end
if word then audit.deny(key.audit, 'scale', arg, word, detail) end
local s = { id = arg.saga, state = 'PREPARING', epoch = saga.draw(record), from = record.shards, to = arg.shards,
  ordered = arg.ordered == 1, quiesce = arg.quiesce == 1, back = false, opened = true, void = 0, began_ms = now,
  reason = '-' }
saga.save(key.record, record, s, 'drawn', int(s.epoch), 'top', int(math.max(record.top, arg.shards)))
audit.add(key.audit, 'scale', 'accepted', 'OK', arg.saga, arg)
return { 'OK', arg.saga }
