-- limiters: three rate limiters. It knows nothing of jobs or tenants, so any system can use it. The
-- state of a limit is two fields of one hash, however many windows pass. The caller reads them with
-- one HMGET, together with its other fields, and hands them to left; spend writes them. left writes
-- only to correct a stored time that is too late: after a step back of the clock; with token also
-- when more was spent than was left, or when the bucket has become smaller. Each limit needs a hash
-- of its own. The caller does the precheck, sets the TTL, and assigns the variables below SETS.
-- NEEDS  base
-- SETS
--   LIMITER    the kind that the script uses: fixed, sliding or token
--   WIDTH      length of a window, ms
--   US         the time by which the limiters decide, µs. It may go back
--   BURST      token only: permits that the bucket holds; nil = as many as a window has
-- OFFERS
--   LIMIT_FIELDS[kind]                names of the two fields; token has the same one twice
--   left[kind](key, a, b, permits)    permits that are left, µs of the next one, state for spend
--   spend[kind](key, s, n, into)      takes n permits; s is the state
--   refund[kind](key, state, at)      sliding and token only: gives back one permit that was spent
--                                     at the time `at`, µs
--   move(key, state, at, into)        sliding only: a permit spent at `at` counts as spent now

local LIMITER, WIDTH, US, BURST

-- The limiters, and their fields in the hash:
--   fixed    w, n   At most `permits` in each window of WIDTH that is aligned to the epoch.
--                   w: the window's start, ms; n: permits spent in it
--   sliding  s, n   At most `permits` in any span of WIDTH.
--                   s: a log of the spent permits. Those of a 64th of WIDTH are in one entry, under
--                   the time of the latest; n: their sum
--   token    t      At most permits * time / WIDTH + BURST in any time: the generic cell rate
--                   algorithm (ITU-T I.371).
--                   t: the theoretical arrival time, µs. `permits` may change between calls,
--                   because t is a time and not a number of permits
-- When the clock steps back, no permit is spent twice. A stored time that is too late would delay
-- the next permit too long, so left moves it back: fixed to the next window at most; sliding to now
-- if it is more than WIDTH ahead; token to that of an empty bucket at most. So a step back delays
-- permits by at most two windows; with token, by at most the time in which an empty bucket fills.
local LIMIT_FIELDS = { fixed = { 'w', 'n' }, sliding = { 's', 'n' }, token = { 't', 't' } }
local left, spend, refund, move = {}, {}, {}

-- left returns the permits that are left (below 0 if more were spent than `permits` now allows),
-- the time (µs) of the next one if none is left, and the state for spend. a and b are the values of
-- the two fields of key.
function left.fixed(key, a, b, permits)
  local now = floor(US / 1000)
  local cur, at, n = now - now % WIDTH, tonumber(a or 0), tonumber(b or 0)
  if at > cur + WIDTH then
    at = cur + WIDTH
    call('HSET', key, 'w', string.format('%.0f', at))
  elseif at < cur then
    at, n = cur, 0
  end
  return permits - n, (at + WIDTH) * 1000, { at = at, n = n }
end
function left.token(key, a, _, permits)
  local each, at = WIDTH * 1000 / permits, math.max(tonumber(a or 0), US)
  local depth = BURST and BURST * each or WIDTH * 1000
  if at > US + depth then
    at = US + depth
    call('HSET', key, 't', string.format('%.2f', at))
  end
  return floor((US + depth - at) / each + 1e-6), at + each - depth, { at = at, each = each }
end

-- spend takes n permits, even if fewer are left. s is the state that left has returned: spend adds
-- the permits to it, so that it serves for another spend, and writes it to the hash. With a list
-- `into` it adds the fields and values to the list instead; fixed ignores the list.
local function store(key, into, a, value, b, n)
  if into then
    into[#into + 1], into[#into + 2] = a, value
    if b then into[#into + 1], into[#into + 2] = b, n end
  elseif b then
    call('HSET', key, a, value, b, n)
  else
    call('HSET', key, a, value)
  end
end
function spend.fixed(key, s, n)
  s.n = s.n + n
  call('HSET', key, 'w', string.format('%.0f', s.at), 'n', s.n)
end
function spend.token(key, s, n, into)
  -- A double represents today's time in µs to a quarter of a µs. Rounding up never allows more than
  -- the limit.
  s.at = math.ceil((s.at + n * s.each) * 4) / 4
  store(key, into, 't', string.format('%.2f', s.at))
end

-- refund gives back one permit, unless it counts no more. It is exact only under these conditions;
-- any other refund would let more than the limit through. sliding: WIDTH is as it was at the time
-- `at`. token: nothing was spent since. fixed has no refund.
function refund.token(key, s)
  if s.at > US then spend.token(key, s, -1) end
end

do -- sliding
  local ENTRY = 28 -- characters of an entry of the log: µs, a colon, permits, a semicolon

  local function log_entry(at, n) return string.format('%016.0f:%010d;', at, n) end

  function left.sliding(key, a, b, permits)
    local width, log, from = WIDTH * 1000, a or '', 1
    local sum = log == '' and 0 or tonumber(b or 0) -- without a log, b is of another limiter
    while from < #log and tonumber(string.sub(log, from, from + 15)) <= US - width do
      sum = sum - tonumber(string.sub(log, from + 17, from + 26))
      from = from + ENTRY
    end
    log = string.sub(log, from)
    local last = tonumber(string.sub(log, -ENTRY, -ENTRY + 15))
    if last and last > US + width then
      log = log_entry(US, sum)
      call('HSET', key, 's', log, 'n', sum)
    end
    -- Spent permits leave the span in the order in which they were spent. The next permit comes
    -- when fewer than `permits` are left in the span.
    local next_at, excess, i = US, sum - permits, 1
    while excess >= 0 and i < #log do
      excess = excess - tonumber(string.sub(log, i + 17, i + 26))
      next_at = tonumber(string.sub(log, i, i + 15)) + width
      i = i + ENTRY
    end
    return permits - sum, next_at, { log = log, n = sum }
  end

  function spend.sliding(key, s, n, into)
    local slot, last = WIDTH * 1000 / 64, tonumber(string.sub(s.log, -ENTRY, -ENTRY + 15))
    if last and floor(last / slot) >= floor(US / slot) then
      local entry = log_entry(math.max(last, US), tonumber(string.sub(s.log, -ENTRY + 17, -2)) + n)
      s.log = string.sub(s.log, 1, -ENTRY - 1) .. entry
    else
      s.log = s.log .. log_entry(US, n)
    end
    s.n = s.n + n
    store(key, into, 's', s.log, 'n', s.n)
  end

  -- cut takes one permit that was spent at the time `at` out of s, the log of a sliding limiter. It
  -- returns false when the permit has left the span. All permits that were spent in one 64th of
  -- WIDTH are in one entry.
  local function cut(s, at)
    local slot, i = WIDTH * 1000 / 64, #s.log - ENTRY + 1
    while i > 0 do
      local time = tonumber(string.sub(s.log, i, i + 15))
      if time < at then return false end
      if floor(time / slot) == floor(at / slot) then
        local n = tonumber(string.sub(s.log, i + 17, i + 26)) - 1
        s.log = string.sub(s.log, 1, i - 1) .. (n > 0 and log_entry(time, n) or '')
          .. string.sub(s.log, i + ENTRY)
        s.n = s.n - 1
        return true
      end
      i = i - ENTRY
    end
    return false
  end

  function refund.sliding(key, s, at)
    if cut(s, at) then call('HSET', key, 's', s.log, 'n', s.n) end
  end

  -- move counts a permit that was spent at the time `at` as spent now. WIDTH is as it was then.
  -- A permit that has left the span is spent again. into is as in spend.
  function move(key, s, at, into)
    cut(s, at)
    spend.sliding(key, s, 1, into)
  end
end
