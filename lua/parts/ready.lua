-- ready: how full the ready stream of a type is.
-- NEEDS  base, signals
-- OFFERS
--   stream_depth(stream)    entries of a ready stream, and how many are undelivered
--   refill(typ)             wakes the fetcher if the stream was full and has free capacity now
--   is_stuck(full, now)     whether the stream has been full for more than a second
--   QUICK_MS                how long the run time of quick jobs is valid

-- stream_depth returns the number of entries of a ready stream, and how many of them are
-- undelivered.
local function stream_depth(stream)
  local n = call('XLEN', stream)
  if n == 0 then return 0, 0 end
  local p = redis.pcall('XPENDING', stream, 'workers')
  if p.err then return n, n end -- no consumer group: no worker has read yet
  return n, math.max(0, n - p[1])
end

-- refill wakes the fetcher if a ready stream that admit found full has free capacity again. The
-- field full of load:TYPE is 'U E SINCE': there is free capacity when at most U entries are
-- undelivered and the stream has at most E entries; it became full at SINCE (ms). refill wakes the
-- fetcher once, because it then deletes the field. Without the field it does nothing.
local function refill(typ)
  local load_key, stream = B .. 'load:' .. typ, B .. 'ready:' .. typ
  local full = call('HGET', load_key, 'full')
  if not full then return end
  local undelivered, entries = string.match(full, '^(%d+) (%d+)')
  local n, unread = stream_depth(stream)
  if n > tonumber(entries or n) or unread > tonumber(undelivered or n) then return end
  call('HDEL', load_key, 'full')
  wake('fetcher')
end

-- QUICK_MS is how long the field quick of load:TYPE is valid after quick_at.
local QUICK_MS = 10000

-- is_stuck says whether a type's stream has been full for more than STUCK_MS. Then its waiting jobs
-- can't use permits now. full is the field full of load:TYPE (see refill).
local STUCK_MS = 1000
local function is_stuck(full, now)
  local since = tonumber(string.match(full or '', '(%d+)$') or nil)
  return since ~= nil and now - since > STUCK_MS
end
