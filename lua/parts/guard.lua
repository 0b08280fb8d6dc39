-- guard: members, leases, breakers and the queue of a guard. lua/guard/README.md draws the states
-- of a member and of a breaker. A script calls open, reads what it needs, calls maintain and serve,
-- does its own work, and ends with close.
-- NEEDS  base, limiters
-- OFFERS
--   G                              fields of the guard's hash, as numbers where they are numbers
--   SPEC                           the guard's spec
--   read_spec(text)                sets SPEC
--   NOW, MS                        guard time in µs and in ms. Each grant adds 1 µs to NOW
--   MORE                           maintain, serve or fit_member has reached a bound, so more may
--                                  be left to do
--   open()                         reads the guard and sets G, SPEC, NOW, MS and IDLE. It writes
--                                  nothing
--   set(field, value)              notes a field of the guard's hash, which flush writes
--   flush()                        writes the noted fields. It is the first write of a script
--   count(field)                   adds 1 to a counter of the guard's hash
--   touched(key)                   notes a written key, so that close sets its TTL
--   load(id)                       reads a member; returns nil for an unknown id
--   note(m, field, value)          notes a field of a member, which save writes
--   save(m)                        writes what has changed of a member
--   place(m)                       puts a member into free or cooling, or takes it out of both
--   standing(m)                    the member's state, and from when on a cooling member is free
--   change_breaker(m, to)          a new state of the breaker, and a new generation
--   fit_member()                   the least recently used member that can be lent now, or nil
--   grant(m, id, client, ms, claimed)
--                                  lends a member; the lease ends after ms. claimed: '0' or '1'.
--                                  Returns the fence and whether the call is a probe (0, 1)
--   read_lease(id)                 reads a lease; nil if there is none
--   claim(id, lease, ms)           marks a lease as claimed; it ends ms from now
--   remove_member(id)              deletes a member
--   end_lease(id, lease, outcome, delay)
--                                  ends a lease. Returns the breaker's state, whether it has
--                                  changed, and whether the lease was of another generation.
--                                  outcome: s success, f failure, n neutral, t throttled (for delay
--                                  ms), u unused, l lost
--   is_dead(id)                    whether a waiter has timed out or its client is silent
--   remove_waiter(id)              takes a call out of the queue; false if it was not in it
--   precheck_guard()               prechecks the keys that maintain and serve write. A script that
--                                  writes before maintain calls it
--   maintain()                     ends leases that are over, forgets silent clients, and frees
--                                  members whose time has come. It prechecks all keys but those of
--                                  members first
--   serve()                        grants members to waiters; false if more may be left to do
--   IDLE                           no call waits, and no client did lately: the keys queue, waiters
--                                  and clients do not exist. open sets it
--   added(key, id, score)          notes that the script has added a lease or a cooling member
--   removed(key, id)               notes that the script has removed one
--   next_at()                      the time (µs) of the next cooling member and of the next expiry
--   whole(n)                       n as text, without an exponent
--   next_ms()                      ms until a member can be lent; 0 = call again, -1 = unknown
--   close()                        writes what is noted, renews TTLs and wakes waiters

local G, SPEC, NOW, MS = {}, {}, 0, 0
local MORE = false
local noted, written = {}, {}   -- fields that flush will write; keys whose TTL close sets
local wake = {}                 -- channel, call id, ...
local IDLE = false              -- there is no queue, no waiter and no client: nothing to check or serve
local FIRST = {}                -- first lease and cooling member: {id, score}; false = none, nil = not read
local throttled_ms = 0          -- the longest time for which the script has throttled a member
local CLAIM, SILENT = 2000, 5000 -- ms to claim a grant; ms after which a client is silent
local STEP = 16                 -- most leases, clients, members and grants, of each, in one call
local TRIES = 64                -- members that fit_member tries; dead waiters that serve removes

local COUNTERS = { 'granted', 'denied', 'queued', 'expired', 'stale', 'lost' }

-- A spec is text of twelve fields: kind, permits, window, burst, failures, open for, successes,
-- concurrency, lease, max wait, max queue, ttl. The override of a member is text of the first
-- eight. With an empty kind, the first four are as in the spec; with empty failures, the next
-- three; an empty concurrency too. kind is sliding, token or none; times are in ms; failures 0 = no
-- breaker; concurrency 0 = unbounded; ttl 0 = the guard's keys do not expire.
local RULES = '^(%a*)|(%d*)|(%d*)|(%d*)|(%d*)|(%d*)|(%d*)|(%d*)'
local TIMES = '^%a*|%d*|%d*|%d*|%d*|%d*|%d*|%d*|(%d+)|(%d+)|(%d+)|(%d+)$'

local function read_rules(text, rules)
  local kind, permits, window, burst, failures, open_for, good, most = string.match(text, RULES)
  if kind ~= '' then
    rules.kind, rules.permits, rules.window = kind, tonumber(permits), tonumber(window)
    rules.burst = tonumber(burst)
  end
  if failures ~= '' then
    rules.failures, rules.open_for = tonumber(failures), tonumber(open_for)
    rules.successes = tonumber(good)
  end
  if most ~= '' then rules.concurrency = tonumber(most) end
end

-- read_spec sets the fields of SPEC from its text. SPEC.memory is how long a spent permit counts,
-- ms, a year at most: the window of a sliding limit, or the time in which an empty bucket fills.
local function read_spec(text)
  read_rules(text, SPEC)
  SPEC.memory = SPEC.window or 0
  if SPEC.kind == 'token' then
    SPEC.memory = (SPEC.burst or 0) * SPEC.memory / math.max(1, SPEC.permits or 1)
  end
  SPEC.memory = math.min(SPEC.memory, 31536000000)
  SPEC.limit = string.match(text, '^%a*|%d*|%d*|%d*')
  local lease, wait, queue, ttl = string.match(text, TIMES)
  SPEC.lease, SPEC.wait = tonumber(lease), tonumber(wait)
  SPEC.queue, SPEC.ttl = tonumber(queue), tonumber(ttl)
end

local last_n, last_text -- most calls are for the same time
local function whole(n)
  if n ~= last_n then last_n, last_text = n, string.format('%.0f', n) end
  return last_text
end

local function set(field, value)
  noted[#noted + 1] = field
  noted[#noted + 1] = value
end

local function touched(key) written[key] = true end

local function open()
  local h = call('HMGET', B .. 'guard', 'rev', 'spec', 'fence', 'seq', 'clk', 'offset', 'since',
    unpack(COUNTERS))
  G.rev, G.spec, G.fence, G.seq = tonumber(h[1] or nil), h[2], tonumber(h[3] or 0), tonumber(h[4] or 0)
  G.time = now_us()
  local clk, offset = tonumber(h[5] or 0), tonumber(h[6] or 0)
  NOW, G.since = G.time + offset, tonumber(h[7] or 0)
  for i, name in ipairs(COUNTERS) do G[name] = tonumber(h[7 + i] or 0) end
  if NOW < clk then
    NOW = clk + 1
    set('offset', whole(NOW - G.time))
  end
  MS = floor(NOW / 1000)
  if NOW - clk > 2000000 then
    G.since = NOW
    set('since', whole(NOW))
  end
  G.begun, G.reads = false, false
  IDLE = call('EXISTS', B .. 'queue', B .. 'waiters', B .. 'clients') == 0
  if G.spec then read_spec(G.spec) end
end

local function flush()
  if G.begun and #noted == 0 then return end
  G.begun, G.clk = true, NOW
  call('HSET', B .. 'guard', 'clk', whole(NOW), unpack(noted))
  noted = {}
end

local function count(field)
  G[field] = G[field] + 1
  set(field, G[field])
end

-- limits computes the limiter's state of the member m: the permits that are left, and when the next
-- one comes. read_limit does it for the stored fields s, n and t, written under the limit m.was.
-- A limit of another kind has no more permits left than the old one had; unless G.reads is set,
-- read_limit stores that. Permits spent before m.since can't be moved or given back.
local function limits(m)
  WIDTH, BURST, US = m.window, m.burst, NOW
  m.left, m.next, m.state = left[m.kind](m.key, m.a, m.b, m.permits)
end
local function read_limit(m, s, n, t)
  if m.was == m.limit then
    if m.kind == 'sliding' then m.a, m.b = s, n else m.a, m.b = t, nil end
    return limits(m)
  end
  local kind, permits, window, burst = string.match(m.was, '^(%a*)|(%d*)|(%d*)|(%d*)$')
  local before
  if kind == 'sliding' or kind == 'token' then
    local now_kind, now_permits, now_window, now_burst = m.kind, m.permits, m.window, m.burst
    m.kind, m.permits, m.window, m.burst = kind, tonumber(permits), tonumber(window), tonumber(burst)
    if kind == 'sliding' then m.a, m.b = s, n else m.a, m.b = t, nil end
    if now_kind ~= kind then
      limits(m)
      before = m.left
      m.a, m.b = nil, nil
    end
    m.kind, m.permits, m.window, m.burst = now_kind, now_permits, now_window, now_burst
  end
  if m.kind ~= 'none' then limits(m) end
  if G.reads or m.was == m.limit then return end
  flush()
  call('HSET', m.key, 'lim', m.limit)
  if kind ~= 'sliding' or m.kind ~= kind or m.window ~= tonumber(window) then
    call('HSET', m.key, 'ls', whole(NOW))
    m.since = NOW
  end
  if not before then return end
  call('HDEL', m.key, 's', 'n', 't')
  if m.kind ~= 'none' and m.left > before then
    spend[m.kind](m.key, m.state, m.left - math.max(before, 0))
    m.a, m.b = m.state.log or m.state.at, m.state.n
    limits(m)
  end
end

local function note(m, field, value)
  m.changed[#m.changed + 1] = field
  m.changed[#m.changed + 1] = value
end

local function change_breaker(m, to)
  m.breaker, m.generation, m.good, m.probes = to, m.generation + 1, 0, 0
  if to == 'C' then m.fails = 0 end
  if to == 'O' then m.open_until = NOW + m.open_for * 1000 end
  for field, value in pairs({ b = to, g = m.generation, k = 0, p = 0, f = m.fails, o = whole(m.open_until) }) do
    note(m, field, value)
  end
end

local function load(id)
  local key = B .. 'm:' .. id
  local h = call('HMGET', key, 'u', 'uses', 'h', 'c', 'off', 'spec', 'lim', 'ls',
    'b', 'f', 'k', 'o', 'g', 'p', 's', 'n', 't')
  if not h[1] then return nil end
  local m = {
    id = id, key = key, used = tonumber(h[1]), uses = tonumber(h[2] or 0), held = tonumber(h[3] or 0),
    throttled = tonumber(h[4] or 0), off = h[5], since = tonumber(h[8] or 0), was = h[7] or '',
    breaker = h[9] or 'C', fails = tonumber(h[10] or 0), good = tonumber(h[11] or 0),
    open_until = tonumber(h[12] or 0), generation = tonumber(h[13] or 0), probes = tonumber(h[14] or 0),
    kind = SPEC.kind, permits = SPEC.permits, window = SPEC.window, burst = SPEC.burst,
    failures = SPEC.failures, open_for = SPEC.open_for, successes = SPEC.successes,
    concurrency = SPEC.concurrency, override = h[6] or '', left = 0, next = 0, changed = {},
  }
  if m.override ~= '' then read_rules(m.override, m) end
  if m.kind == 'none' then
    m.limit = 'none|||'
  elseif m.override == '' then
    m.limit = SPEC.limit
  else
    m.limit = m.kind .. '|' .. m.permits .. '|' .. m.window .. '|' .. m.burst
  end
  if m.kind ~= 'none' or m.was ~= '' and m.was ~= m.limit then
    read_limit(m, h[15] or nil, h[16] or nil, h[17] or nil)
  end
  -- A spec without breaker (failures 0) has no successes that could close a breaker. So a half-open
  -- one closes at once, and an open one when its time has passed.
  if m.failures == 0 and (m.breaker == 'H' or m.breaker == 'O' and m.open_until <= NOW) then
    change_breaker(m, 'C')
  end
  return m
end

local function save(m)
  if #m.changed == 0 then return end
  flush()
  call('HSET', m.key, unpack(m.changed))
  m.changed = {}
end

-- standing returns the state of a member (off, busy, cooling or free); for cooling also the time,
-- µs, from which on the member may be lent.
local function standing(m)
  if m.off then return 'off' end
  if m.concurrency > 0 and m.held >= m.concurrency then return 'busy' end
  -- A new spec may ask for fewer successes than the breaker has had already: then one more probe
  -- closes it.
  if m.breaker == 'H' and m.probes >= math.max(1, m.successes - m.good) then return 'busy' end
  local due = m.throttled
  if m.breaker == 'O' then due = math.max(due, m.open_until) end
  if m.kind ~= 'none' and m.left < 1 then due = math.max(due, m.next, NOW + 1) end
  if due > NOW then return 'cooling', math.ceil(due) end
  return 'free'
end

-- first returns the first member of a sorted set and its score, and caches them in FIRST; false if
-- the set is empty.
local function first(key)
  if FIRST[key] == nil then
    local found = call('ZRANGE', B .. key, 0, 0, 'WITHSCORES')
    FIRST[key] = found[1] and { found[1], tonumber(found[2]) } or false
  end
  return FIRST[key]
end

-- added and removed update the cache FIRST of first after the script's own ZADD or ZREM.
local function added(key, id, score)
  local known = FIRST[key]
  if known == false or known and known[1] ~= id and score < known[2] then
    FIRST[key] = { id, score }
  elseif known and (known[1] == id or score == known[2]) then
    FIRST[key] = nil
  end
end
local function removed(key, id)
  local known = FIRST[key]
  if known and known[1] == id then FIRST[key] = nil end
end

local function place(m)
  flush()
  local where, due = standing(m)
  if where == 'free' then
    call('ZADD', B .. 'free', whole(m.used), m.id)
    touched('free')
  else
    call('ZREM', B .. 'free', m.id)
  end
  if where == 'cooling' then
    call('ZADD', B .. 'cooling', whole(due), m.id)
    added('cooling', m.id, due)
    touched('cooling')
  elseif first('cooling') then
    call('ZREM', B .. 'cooling', m.id)
    removed('cooling', m.id)
  end
end

-- fit_member returns the least recently used member that can be lent now; nil if there is none, or
-- (MORE) if TRIES members were unfit. It moves each unfit member that it meets to the right set, so
-- that it meets each one once.
local function fit_member()
  for _ = 1, TRIES do
    local id = call('ZRANGE', B .. 'free', 0, 0)[1]
    if not id then return nil end
    local m = load(id)
    if m and standing(m) == 'free' then return m end
    if m then
      save(m)
      place(m)
    else
      flush()
      call('ZREM', B .. 'free', id)
    end
  end
  MORE = true
  return nil
end

local function grant(m, id, client, ms, claimed)
  NOW = NOW + 1
  G.fence = math.max(G.fence + 1, G.time)
  set('fence', whole(G.fence))
  count('granted')
  flush()
  if m.breaker == 'O' then change_breaker(m, 'H') end
  local probe = m.breaker == 'H' and 1 or 0
  if probe == 1 then
    m.probes = m.probes + 1
    note(m, 'p', m.probes)
  end
  m.held, m.used, m.uses = m.held + 1, NOW, m.uses + 1
  note(m, 'h', m.held)
  note(m, 'u', whole(NOW))
  note(m, 'uses', m.uses)
  if m.kind ~= 'none' then
    US = NOW
    if m.kind == 'token' then m.state.at = math.max(m.state.at, NOW) end
    spend[m.kind](m.key, m.state, 1, m.changed)
    m.a, m.b = m.state.log or m.state.at, m.state.n
    limits(m)
  end
  save(m)
  place(m)
  call('ZADD', B .. 'leases', whole(MS + ms), id)
  added('leases', id, MS + ms)
  call('HSET', B .. 'lease', id, table.concat({ whole(G.fence), m.id, m.generation, probe, client,
    whole(NOW), claimed }, '|'))
  touched('leases')
  touched('lease')
  return whole(G.fence), probe
end

local LEASE = '^(%d+)|([^|]+)|(%d+)|(%d)|([^|]*)|(%d+)|(%d)$'

local function read_lease(id)
  local text = call('HGET', B .. 'lease', id)
  if not text then return nil end
  local fence, member, generation, probe, client, granted, claimed = string.match(text, LEASE)
  if not fence then return nil end
  return {
    fence = fence, member = member, generation = tonumber(generation), probe = tonumber(probe),
    client = client, granted = tonumber(granted), claimed = claimed == '1', text = text,
  }
end

local function claim(id, lease, ms)
  flush()
  call('ZADD', B .. 'leases', whole(MS + ms), id)
  added('leases', id, MS + ms)
  touched('leases')
  if not lease.claimed then call('HSET', B .. 'lease', id, string.sub(lease.text, 1, -2) .. '1') end
end

-- settle_permit gives the permit of an unused lease back if the limiter can do that exactly. With
-- the sliding limiter, the permit of any other lease counts as spent now: the downstream API sees
-- the call at some time between grant and release.
local function settle_permit(m, lease, outcome)
  if m.kind == 'none' or lease.granted < m.since then return end
  if outcome == 'u' then
    if m.kind == 'token' and m.used ~= lease.granted then return end
    refund[m.kind](m.key, m.state, lease.granted)
  elseif m.kind == 'sliding' then
    move(m.key, m.state, lease.granted)
  else
    return
  end
  m.a, m.b = m.state.log or m.state.at, m.state.n
  limits(m)
end

-- settle_breaker applies the outcome of a call to the member's breaker, and returns whether that
-- has changed its state. A lost probe (outcome l: its lease has expired or was taken back) is a
-- failure. With outcome t the member can't be lent for delay ms, at most a day.
local function settle_breaker(m, probe, outcome, delay)
  if outcome == 't' then
    delay = math.min(delay, 86400000)
    m.throttled, throttled_ms = NOW + delay * 1000, math.max(throttled_ms, delay)
    note(m, 'c', whole(m.throttled))
  end
  if m.failures == 0 then return false end
  if probe == 1 then
    if outcome == 'f' or outcome == 'l' then
      change_breaker(m, 'O')
      return true
    end
    m.probes = m.probes - 1
    note(m, 'p', m.probes)
    if outcome ~= 's' then return false end
    m.good = m.good + 1
    note(m, 'k', m.good)
    if m.good < m.successes then return false end
    change_breaker(m, 'C')
    return true
  end
  if outcome == 'f' then
    m.fails = m.fails + 1
    note(m, 'f', m.fails)
    if m.fails < m.failures then return false end
    change_breaker(m, 'O')
    return true
  elseif outcome == 's' and m.fails > 0 then
    m.fails = 0
    note(m, 'f', 0)
  end
  return false
end

local function remove_member(id)
  flush()
  call('DEL', B .. 'm:' .. id)
  for _, key in ipairs({ 'members', 'free', 'cooling' }) do call('ZREM', B .. key, id) end
  removed('cooling', id)
end

local function end_lease(id, lease, outcome, delay)
  local m = load(lease.member)
  if m and m.off == 'R' then precheck('ZCARD', B .. 'members') end
  flush()
  call('ZREM', B .. 'leases', id)
  removed('leases', id)
  call('HDEL', B .. 'lease', id)
  if not m then return 'C', false, false end
  m.held = math.max(0, m.held - 1)
  note(m, 'h', m.held)
  settle_permit(m, lease, outcome)
  local changed, stale = false, false
  if lease.generation == m.generation then
    changed = settle_breaker(m, lease.probe, outcome, delay)
  else
    stale = true
  end
  if m.off == 'R' and m.held == 0 then
    remove_member(m.id)
  else
    save(m)
    place(m)
  end
  return m.breaker, changed, stale
end

local function is_dead(id)
  local client, deadline = string.match(call('HGET', B .. 'waiters', id) or '', '^([^|]*)|(%d+)$')
  if not client or tonumber(deadline) <= MS then return true end
  local sign = tonumber(call('ZSCORE', B .. 'clients', client) or nil)
  return not sign or MS - math.max(sign, floor(G.since / 1000)) > SILENT
end

local function remove_waiter(id)
  flush()
  call('HDEL', B .. 'waiters', id)
  return call('ZREM', B .. 'queue', id) == 1
end

local function precheck_guard()
  precheck('HLEN', B .. 'lease', B .. 'waiters')
  precheck('ZCARD', B .. 'free', B .. 'cooling', B .. 'leases', B .. 'queue', B .. 'clients')
end

local function maintain()
  precheck('HLEN', B .. 'lease')
  precheck('ZCARD', B .. 'free')
  if not IDLE then
    precheck('HLEN', B .. 'waiters')
    precheck('ZCARD', B .. 'queue', B .. 'clients')
  end
  local over, due, silent = {}, {}, {}
  local lease, member = first('leases'), first('cooling')
  if lease and lease[2] <= MS then
    over = call('ZRANGEBYSCORE', B .. 'leases', '-inf', whole(MS), 'LIMIT', 0, STEP)
  end
  if member and member[2] <= NOW then
    due = call('ZRANGEBYSCORE', B .. 'cooling', '-inf', whole(NOW), 'LIMIT', 0, STEP)
  end
  if SPEC.wait and not IDLE and MS - floor(G.since / 1000) > SILENT then
    silent = call('ZRANGEBYSCORE', B .. 'clients', '-inf', whole(MS - SPEC.wait - SILENT), 'LIMIT', 0, STEP)
  end
  for _, id in ipairs(over) do
    local lease = read_lease(id)
    if not lease then
      flush()
      call('ZREM', B .. 'leases', id)
      removed('leases', id)
      call('HDEL', B .. 'lease', id)
    elseif lease.claimed then
      count('lost')
      end_lease(id, lease, 'l', 0)
    else
      count('expired')
      end_lease(id, lease, 'u', 0)
      -- A waiter did not claim its grant in time. If its client has called since the grant, the
      -- client is alive (Redis or the network was slow), so only a silent client is removed.
      local sign = tonumber(call('ZSCORE', B .. 'clients', lease.client) or nil)
      if sign and MS - math.max(sign, floor(G.since / 1000)) >= CLAIM then
        call('ZREM', B .. 'clients', lease.client)
      end
    end
  end
  if #silent > 0 then
    flush()
    call('ZREM', B .. 'clients', unpack(silent))
  end
  for _, id in ipairs(due) do
    local m = load(id)
    if m then
      save(m)
      place(m)
    else
      flush()
      call('ZREM', B .. 'cooling', id)
      removed('cooling', id)
    end
  end
  MORE = MORE or #over == STEP or #due == STEP or #silent == STEP
end

-- serve grants members to the first waiters that are alive, and removes the dead waiters before
-- them from the queue.
local function serve()
  if IDLE then return true end
  local gone = 0
  for _ = 1, STEP + TRIES do
    local id = call('ZRANGE', B .. 'queue', 0, 0)[1]
    if not id then return true end
    if is_dead(id) then
      if gone == TRIES then break end
      gone = gone + 1
      remove_waiter(id)
    else
      local m = fit_member()
      if not m then return not MORE end
      local client = string.match(call('HGET', B .. 'waiters', id), '^([^|]*)|')
      remove_waiter(id)
      grant(m, id, client, CLAIM, '0')
      wake[#wake + 1] = string.match(B, '^(.-)guard:{') .. 'guard:wake:' .. client
      wake[#wake + 1] = id
      if #wake == 2 * STEP then break end
    end
  end
  MORE = true
  return false
end

local function next_at()
  local cooling, lease = first('cooling'), first('leases')
  return cooling and cooling[2], lease and lease[2] * 1000
end

local function next_ms()
  if MORE then return 0 end
  local cooling, expiry = next_at()
  if not cooling and not expiry then return -1 end
  local at = math.min(cooling or expiry, expiry or cooling)
  return math.max(1, math.ceil((at - NOW) / 1000))
end

-- close sets a TTL for each key that was noted by touched, and for all keys when less than half is
-- left, or less than 30 s beyond what they must outlive; with ttl 0 for none. The keys outlive each
-- lease, which may be longer than those of the present spec, each time at which a member is free
-- again, and the time for which a permit that is spent now counts.
local KEYS_OF_A_GUARD = { 'guard', 'm:1', 'members', 'free', 'cooling', 'leases', 'lease', 'queue',
  'waiters', 'clients' }
local function close()
  if #noted > 0 or G.begun and NOW > G.clk then flush() end
  if G.begun and SPEC.ttl and SPEC.ttl > 0 then
    local last = tonumber(call('ZRANGE', B .. 'leases', -1, -1, 'WITHSCORES')[2] or MS) - MS
    local due = (tonumber(call('ZRANGE', B .. 'cooling', -1, -1, 'WITHSCORES')[2] or NOW) - NOW) / 1000
    local needed = math.ceil(math.max(SPEC.lease, SPEC.memory, last, due, throttled_ms))
    local all = call('PTTL', B .. 'guard') < math.max(SPEC.ttl / 2, needed + 30000)
    local ttl = math.max(SPEC.ttl, needed + 60000)
    for _, key in ipairs(KEYS_OF_A_GUARD) do
      if all or written[key] then call('PEXPIRE', B .. key, ttl) end
    end
  end
  for i = 1, #wake, 2 do redis.pcall('PUBLISH', wake[i], wake[i + 1]) end
end
