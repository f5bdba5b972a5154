-- Remove entries that nobody needs any more.
-- @include int

-- Parameters: stream; id below which nobody needs any; keep: so many stay, roughly, all the same; 0: none.
-- Returns: how many went.
local function trim(stream, needed, keep)
  if keep == 0 then return redis.call('XTRIM', stream, 'MINID', needed) end
  local excess = redis.call('XLEN', stream) - keep
  if excess <= 0 then return 0 end
  return redis.call('XTRIM', stream, 'MINID', '~', needed, 'LIMIT', int(excess))
end

return { trim = trim }
