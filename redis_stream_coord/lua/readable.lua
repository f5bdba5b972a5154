-- Say which shards the members of a group may be given: so many, from 0 on. A resharding says it in two steps: all
-- shards of both layouts, before it decides; those of the new one, once the group has drained the others. Older words
-- than the last are ignored, so that a driver that was asleep takes nothing back. The first step is refused while the
-- group is frozen: `scale` is on another slot and may have missed that, and without this step nothing is decided. What
-- is decided goes on to its end.
-- @include refuse
-- @include int
-- @include events
-- @include group
-- @key metadata
-- @key events
-- @arg protocol integer
-- @arg epoch integer
-- @arg step integer
-- @arg shards integer
-- @returns OK, incarnation, epoch and step of the last word
-- @error FROZEN
local g = group.open(key.metadata)
group.check_protocol(g, arg.protocol)
local newer = arg.epoch > g.layout_epoch or (arg.epoch == g.layout_epoch and arg.step > g.layout_step)
if not newer then return { 'OK', int(g.incarnation), int(g.layout_epoch), int(g.layout_step) } end
if arg.step == 1 and g.frozen then refuse('FROZEN', int(g.frozen)) end
group.complete(g)
local changed = {}
for index = 0, arg.shards - 1 do
  local s = g.shards[index]
  if not s then
    s = { index = index, token = 0, state = 'free', deadline_ms = 0, hold_until_ms = 0 }
    g.shards[index], g.shard_count = s, g.shard_count + 1
  end
  if not s.readable then s.readable, s.dirty, changed[#changed + 1] = true, true, index end
end
for _, index in ipairs(g.order) do
  local s = g.shards[index]
  if index >= arg.shards and s.readable then
    s.readable, s.dirty, changed[#changed + 1] = false, true, index
    -- Its holder is asked to drain it, which is soon done: there is nothing left.
    if s.state == 'free' then group.drop(g, s) end
  end
end
g.layout_epoch, g.layout_step = arg.epoch, arg.step
if #changed > 0 then g.group_epoch = g.group_epoch + 1 end
group.save(g)
if #changed > 0 then
  events.add(key.events, 'shards_changed', { 'epoch', int(arg.epoch), 'shards', int(arg.shards) }, { '*' })
end
return { 'OK', int(g.incarnation), int(g.layout_epoch), int(g.layout_step) }
