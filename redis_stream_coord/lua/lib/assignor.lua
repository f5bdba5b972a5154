-- Sticky and uniform assignment of shards to members, decided from the arguments alone.
--
-- assign(shards, members, owners) -> target
--   shards    array of shard indexes, ascending
--   members   array of { id = string, weight = integer >= 1, in thousandths, default 1000 }, in any order
--   owners    table shard -> id of the member that owns it now; unknown shards and members are ignored
--   returns   table shard -> member id that covers `shards`; empty if there is no member
--
-- Quotas by largest remainder (Hamilton): floor or ceil of #shards * weight / total weight. As in Kafka's
-- uniform assignor (KIP-848) an owner keeps what fits, its lowest shards first; the rest goes to the least
-- loaded. Ties go to current owners, then by id: moves are the fewest that these quotas allow, and the target
-- of a target is itself. #shards * weight must stay below 2^53. O(shards + members log members).

-- `<` on strings follows the server's locale. Digits sort alike in all of them, so ids sort by their bytes.
local digits = setmetatable({}, {
  __index = function(known, char)
    known[char] = ('%03d'):format(char:byte())
    return known[char]
  end,
})

-- A tie goes to the larger surplus over the floor, not to the larger count: with unequal weights a heavy
-- member owns more in any case, and would take the shard back that a light one got the last time.
local function larger_claim(a, b)
  if a.remainder ~= b.remainder then return a.remainder > b.remainder end
  if a.surplus ~= b.surplus then return a.surplus > b.surplus end
  return a.rank < b.rank
end

local function set_quotas(shares, shard_count, total_weight)
  local by_claim, spare = {}, shard_count
  for rank, share in ipairs(shares) do
    -- Whole numbers throughout: a rounded share would break ties by accident.
    local product = shard_count * share.weight
    share.remainder = product % total_weight
    share.quota = (product - share.remainder) / total_weight
    share.surplus, share.rank = share.owned - share.quota, rank
    by_claim[rank], spare = share, spare - share.quota
  end
  table.sort(by_claim, larger_claim)
  for i = 1, spare do by_claim[i].quota = by_claim[i].quota + 1 end
end

local function assign(shards, members, owners)
  local shares, share_of, total_weight, target, rest = {}, {}, 0, {}, {}
  for i, member in ipairs(members) do
    local share = { id = member.id, weight = member.weight or 1000, owned = 0, load = 0 }
    share.key = share.id:gsub('.', digits)
    shares[i], share_of[share.id], total_weight = share, share, total_weight + share.weight
  end
  if #shares == 0 then return target end
  table.sort(shares, function(a, b) return a.key < b.key end)

  for _, shard in ipairs(shards) do
    local share = share_of[owners[shard]]
    if share then share.owned = share.owned + 1 end
  end
  set_quotas(shares, #shards, total_weight)

  for _, shard in ipairs(shards) do
    local share = share_of[owners[shard]]
    if share and share.load < share.quota then
      target[shard], share.load = share.id, share.load + 1
    else
      rest[#rest + 1] = shard
    end
  end

  -- One pass per load level instead of a heap: a share stays open for at most `quota` passes, #shards in all.
  local open, level, given = shares, 0, 0
  while given < #rest do
    local still_open = {}
    for _, share in ipairs(open) do
      if share.load == level and share.load < share.quota then
        given, share.load = given + 1, share.load + 1
        target[rest[given]] = share.id
      end
      if share.load < share.quota then still_open[#still_open + 1] = share end
    end
    open, level = still_open, level + 1
  end
  return target
end

return { assign = assign }
