-- quick: reads a guard for the most frequent case of acquire and release: no call waits, nothing is
-- due, the member has no rules of its own, and its breaker is closed. Such a call costs about half
-- of one that uses part guard: to make that part's functions takes as long as all of quick. So the
-- two scripts try it before part guard. In any other case nothing has been written yet, and the
-- script goes on with part guard. Both ways write the same; the model test holds them to one
-- reference.
-- NEEDS  base
-- OFFERS
--   quick_guard(spec)         the guard as a table; nil where part guard is needed. Its fields:
--     fence, granted            as in the guard's hash
--     time, now                 Redis time and guard time, µs
--     kind, permits, window, burst, limit
--                               the limiter of the spec, and the text of it that members store
--     failures, most, lease, ttl
--                               of the spec; most is the concurrency; lease and ttl are in ms
--     first, expiry             the call id of the first lease and its end, ms; nil = none
--     due                       when the first cooling member can be lent, µs; nil = none
--   quick_member(g, id)       a member as a table: key, held, uses, generation, used, fails; nil
--                             where part guard is needed
--   quick_ttl(ttl)            sets the TTL (ms; 0 = none) of leases, lease and free, which a quick
--                             call may create; the other keys keep theirs
--   quick_next(expiry, due, now)
--                             ms until a member can be lent, as next_ms in part guard; expiry is in
--                             ms, due and now are in µs
--   quick_text(n)             n as text, without an exponent

-- A spec. The captures: limiter, kind, permits, window, burst, failures, concurrency, lease, ttl.
local QUICK_SPEC = '^((%a+)|(%d*)|(%d*)|(%d*))|(%d+)|%d*|%d*|(%d+)|(%d+)|%d+|%d+|(%d+)$'

local function quick_guard(spec)
  local h = call('HMGET', B .. 'guard', 'spec', 'fence', 'clk', 'offset', 'granted')
  local limit, kind, permits, window, burst, failures, most, lease, ttl =
    string.match(h[1] or '', QUICK_SPEC)
  if not kind or spec ~= '' and spec ~= h[1] then return nil end
  local time = now_us()
  local now = time + (h[4] or 0)
  local passed = now - (h[3] or 0)
  if passed < 0 or passed > 2000000 then return nil end
  if call('EXISTS', B .. 'queue', B .. 'waiters', B .. 'clients') > 0 then return nil end
  local first = call('ZRANGE', B .. 'leases', 0, 0, 'WITHSCORES')
  local due = tonumber(call('ZRANGE', B .. 'cooling', 0, 0, 'WITHSCORES')[2])
  local expiry = tonumber(first[2])
  if expiry and expiry * 1000 <= now or due and due <= now then return nil end
  lease, ttl = tonumber(lease), tonumber(ttl)
  if ttl > 0 then -- a longer TTL than this is for something that lasts longer; see close in part guard
    local memory = tonumber(window) or 0 -- as in part guard
    if kind == 'token' then memory = (tonumber(burst) or 0) * memory / math.max(1, tonumber(permits) or 1) end
    local needed = math.max(lease, math.min(math.ceil(memory), 31536000000))
    ttl = math.max(ttl, needed + 60000)
    local kept = call('PTTL', B .. 'guard')
    if kept > ttl or kept < math.max(ttl / 2, needed + 30000) then return nil end
  end
  if kind == 'none' then limit = 'none|||' end
  return {
    fence = h[2] or 0, granted = h[5] or 0, time = time, now = now, kind = kind, permits = permits,
    window = window, burst = burst, limit = limit, failures = failures, most = tonumber(most),
    lease = lease, ttl = ttl, first = first[1], expiry = expiry, due = due,
  }
end

local function quick_member(g, id)
  local key = B .. 'm:' .. id
  local h = call('HMGET', key, 'h', 'uses', 'g', 'u', 'off', 'spec', 'c', 'b', 'lim', 'f')
  if not h[4] or h[5] or (h[6] or '') ~= '' or (h[7] or 0) + 0 > g.now then return nil end
  if (h[8] or 'C') ~= 'C' or (h[9] or 'none|||') ~= g.limit then return nil end
  return {
    key = key, held = (h[1] or 0) + 0, uses = (h[2] or 0) + 0, generation = h[3] or '0', used = h[4],
    fails = (h[10] or 0) + 0,
  }
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
