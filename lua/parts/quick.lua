-- quick: reads a guard for the most frequent case of acquire and release: no call waits, nothing is
-- due, the guard has no limiter, the member is as its guard says, and its breaker is closed. Such a
-- call costs less than half of one that uses part guard: to make that part's functions takes as
-- long as all of quick. So the two scripts try it before part guard. In any other case nothing has
-- been written yet, and the script goes on with part guard. Both ways write the same; the model
-- test holds them to one reference.
-- NEEDS  base
-- OFFERS
--   quick_guard(spec)         nil where part guard is needed. Otherwise the fields fence and
--                             granted of the guard; Redis time and guard time, µs; failures,
--                             concurrency, lease and ttl of the spec; the first lease and its
--                             expiry, ms; and when the first cooling member is due, µs. The last
--                             three are nil where there is none
--   quick_member(id, now)     nil where part guard is needed. Otherwise the member's leases, uses,
--                             generation, time of last use and failures
--   quick_ttl(ttl)            sets the TTL of the keys that a quick call writes
--   quick_next(expiry, due, now)
--                             ms until a member can be lent, as next_ms in part guard
--   quick_text(n)             n as text, without an exponent

-- A spec without limiter. The captures: failures, concurrency, lease, ttl.
local QUICK_SPEC = '^none|%d*|%d*|%d*|(%d+)|%d*|%d*|(%d+)|(%d+)|%d+|%d+|(%d+)$'

local function quick_guard(spec)
  local h = call('HMGET', B .. 'guard', 'spec', 'fence', 'clk', 'offset', 'granted')
  local failures, most, lease_ms, ttl = string.match(h[1] or '', QUICK_SPEC)
  if not most or spec ~= '' and spec ~= h[1] then return nil end
  local time = now_us()
  local now = time + (h[4] or 0)
  local passed = now - (h[3] or 0)
  if passed < 0 or passed > 2000000 then return nil end
  if call('EXISTS', B .. 'queue', B .. 'waiters', B .. 'clients') > 0 then return nil end
  local first = call('ZRANGE', B .. 'leases', 0, 0, 'WITHSCORES')
  local due = tonumber(call('ZRANGE', B .. 'cooling', 0, 0, 'WITHSCORES')[2])
  local expiry = tonumber(first[2])
  if expiry and expiry * 1000 <= now or due and due <= now then return nil end
  most, lease_ms, ttl = tonumber(most), tonumber(lease_ms), tonumber(ttl)
  if ttl > 0 then -- a longer TTL than that of the spec is for something that lasts longer
    local kept = call('PTTL', B .. 'guard')
    if kept > ttl or kept < math.max(ttl / 2, lease_ms + 30000) then return nil end
  end
  return h[2] or 0, h[5] or 0, time, now, failures, most, lease_ms, ttl, first[1], expiry, due
end

local function quick_member(id, now)
  local h = call('HMGET', B .. 'm:' .. id, 'h', 'uses', 'g', 'u', 'off', 'spec', 'c', 'b', 'lim',
    'f')
  if not h[4] or h[5] or (h[6] or '') ~= '' or (h[7] or 0) + 0 > now then return nil end
  if (h[8] or 'C') ~= 'C' or (h[9] or 'none|||') ~= 'none|||' then return nil end
  return (h[1] or 0) + 0, (h[2] or 0) + 0, h[3] or '0', h[4], (h[10] or 0) + 0
end

local function quick_ttl(ttl)
  if ttl == 0 then return end
  call('PEXPIRE', B .. 'leases', ttl)
  call('PEXPIRE', B .. 'lease', ttl)
  call('PEXPIRE', B .. 'free', ttl)
end

local function quick_next(expiry, due, now)
  local at = expiry and expiry * 1000 or due
  if not at then return -1 end
  return math.max(1, math.ceil((math.min(at, due or at) - now) / 1000))
end

local function quick_text(n) return string.format('%.0f', n) end
