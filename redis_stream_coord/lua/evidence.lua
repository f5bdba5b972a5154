-- How far groups got on a shard, together with its route: what proves that it is drained, or consumed up to a cut. Lag
-- proves nothing: it is nil or wrong after XDEL, XTRIM and XGROUP SETID. Writes nothing.
-- @include int
-- @include route
-- @include position
-- @key stream
-- @key route
-- @arg groups list   names of the registered groups
-- @returns OK, epoch of the route, its state, last id, names of consumer groups that nobody registered; then of each
--   group: 1 if it is there, id of its first entry that is not finished or '', entries pending, lag or ''
local now, there, groups, strangers, known = route.read(key.route), redis.call('EXISTS', key.stream) == 1, {}, {}, {}
for _, name in ipairs(arg.groups) do known[name] = true end
for _, info in ipairs(there and redis.call('XINFO', 'GROUPS', key.stream) or {}) do
  local fields = {}
  for i = 1, #info, 2 do fields[info[i]] = info[i + 1] end
  groups[fields['name']] = fields
  if not known[fields['name']] then strangers[#strangers + 1] = fields['name'] end
end
local reply = { 'OK', int(now.epoch), now.state, position.last_id(key.stream), strangers }
for _, name in ipairs(arg.groups) do
  local group, first, pending, lag = groups[name], '', 0, ''
  if group then
    local summary = redis.call('XPENDING', key.stream, name)
    local after = redis.call('XRANGE', key.stream, '(' .. group['last-delivered-id'], '+', 'COUNT', 1)[1]
    pending = summary[1]
    first = pending > 0 and summary[2] or (after and after[1] or '')
    lag = group['lag'] and int(group['lag']) or ''
  end
  reply[#reply + 1] = (group or not there) and 1 or 0
  reply[#reply + 1] = first
  reply[#reply + 1] = pending
  reply[#reply + 1] = lag
end
return reply
