-- limits: rate limits and their division among tenants, put behind the prelude where a script spends permits.
-- Scripts set LIMITER ('fixed', 'sliding' or 'token'), WIDTH (ms) and US (Redis time, µs) once, then ask for keys.
-- State lies in the hash of whoever is limited, so that a limit is one key however many windows pass.
local LIMITER, WIDTH, US

-- Permits that are left of a limit, and the time (µs) of the next. State is what LIMIT_FIELDS say of the hash.
--   fixed    w, n: at most `permits` in any window of WIDTH that is aligned to the epoch
--   sliding  s, n: at most `permits` in any span of WIDTH: a log of spendings, those of a 64th of WIDTH in one entry under the latest's time
--   token    t: at most permits * time / WIDTH + permits in any time: the generic cell rate algorithm (ITU-T I.371), its state being
--            the theoretical arrival time (µs). The bucket is WIDTH deep whatever `permits` is, so a limit may change in between.
-- A clock that steps back makes nobody's permits come twice, and a big step, by which the state lies more than WIDTH ahead, costs at most two windows.
local LIMIT_FIELDS = { fixed = { 'w', 'n' }, sliding = { 's', 'n' }, token = { 't', 't' } }
local ENTRY = 28 -- characters of an entry of the log: µs, a colon, permits, a semicolon

local function log_entry(at, n) return string.format('%016.0f:%010d;', at, n) end

local left = {}
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
function left.sliding(key, a, b, permits)
  local width, log, from = WIDTH * 1000, a or '', 1
  local sum = log == '' and 0 or tonumber(b or 0) -- another limiter may have left its count
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
  -- The next permit comes when as many have left the span as are too many now.
  local next_at, over, i = US, sum - permits, 1
  while over >= 0 and i < #log do
    over = over - tonumber(string.sub(log, i + 17, i + 26))
    next_at = tonumber(string.sub(log, i, i + 15)) + width
    i = i + ENTRY
  end
  return permits - sum, next_at, { log = log, n = sum }
end
function left.token(key, a, _, permits)
  local width, at = WIDTH * 1000, math.max(tonumber(a or 0), US)
  if at > US + width then
    at = US + width
    call('HSET', key, 't', string.format('%.2f', at))
  end
  local each = width / permits
  return floor((US + width - at) / each + 1e-6), at + each - width, { at = at, each = each }
end

local spend = {}
function spend.fixed(key, s, n)
  s.n = s.n + n
  call('HSET', key, 'w', string.format('%.0f', s.at), 'n', s.n)
end
function spend.sliding(key, s, n)
  local slot, last = WIDTH * 1000 / 64, tonumber(string.sub(s.log, -ENTRY, -ENTRY + 15))
  if last and floor(last / slot) >= floor(US / slot) then
    s.log = string.sub(s.log, 1, -ENTRY - 1) .. log_entry(math.max(last, US), tonumber(string.sub(s.log, -ENTRY + 17, -2)) + n)
  else
    s.log = s.log .. log_entry(US, n)
  end
  s.n = s.n + n
  call('HSET', key, 's', s.log, 'n', s.n)
end
function spend.token(key, s, n)
  -- Quarters of a µs are what a double holds of today's time; rounding up keeps the limit.
  s.at = math.ceil((s.at + n * s.each) * 4) / 4
  call('HSET', key, 't', string.format('%.2f', s.at))
end

-- At most so many types and due tenants are looked at.
local TYPES, TENANTS = 64, 16

-- global reads the partition's limit: what is left, when the next permit comes, the permits a window, and whatever else the hash holds.
-- With several partitions the parts move to where the demand is (see quota): q permits, from qf on q2; all of the limit that tag names.
local function global(total, part, tag)
  local f = LIMIT_FIELDS[LIMITER]
  local h = call('HMGET', B .. 'rate', f[1], f[2], 'xw', 'rs', 'rd', 'qt', 'q', 'q2', 'qf')
  local g = { permits = total, xw = tonumber(h[3] or 0), rs = tonumber(h[4] or 0), rd = tonumber(h[5] or 0), active = call('SCARD', B .. 'active') }
  if total <= 0 then return g end
  if tag ~= '' then
    g.permits = part
    if h[6] == tag then
      g.permits = tonumber(h[7])
      if h[8] and US >= tonumber(h[9]) then g.permits = tonumber(h[8]) end
    end
  end
  if g.permits <= 0 then
    g.left, g.next_at = 0, US + WIDTH * 1000
  else
    g.left, g.next_at, g.state = left[LIMITER](B .. 'rate', h[1], h[2], g.permits)
  end
  return g
end

-- count_due says whether parked jobs are due. Their tenants could use permits now, so they are active, though nothing of theirs may wait.
local function count_due(g, now)
  local due = call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, TENANTS)
  for _, tenant in ipairs(due) do
    if call('SISMEMBER', B .. 'active', tenant) == 0 then g.active = g.active + 1 end
  end
  return #due > 0
end

-- share is one tenant's part of the permits a window: equal parts, or by weight; at least 1.
local function share(g, weight)
  local w = 1000 + extra_weight(weight)
  local all = 1000 * g.active + g.xw
  return math.max(1, floor(g.permits * w / math.max(w, all)))
end

-- own_limit is what a tenant that has a limit of its own gets in a window.
local function own_limit(rps) return math.max(1, floor(tonumber(rps) * WIDTH / 1000)) end

-- permits_of is what a tenant may spend in a window: its own limit, or its share, or the whole where nobody has a share; never more than all have.
local function permits_of(g, limited, rps, weight, whole)
  if not limited then return own_limit(rps) end
  local permits = rps and own_limit(rps) or whole and g.permits or share(g, weight)
  return math.min(permits, math.max(1, g.permits))
end

-- overdue is how many of a tenant's parked jobs have been due for a moment and got no permit: who is due just now is served in time as a rule, and a permit that
-- is kept for it meanwhile would be wasted where permits come one by one.
local GRACE_MS = 20
local function overdue(tenant, now) return call('ZCOUNT', B .. 'non-ready:' .. tenant, '-inf', now - GRACE_MS) end

-- reserved is how many of the permits that are left others may claim for themselves: tenants that wait with some of their share
-- unused, in the lanes of other types, and parked jobs that are due. Only what is beyond may be lent.
local function shares_of(lane, g, equal)
  local n = call('ZCARD', lane)
  if g.xw == 0 or n == 0 then return n * equal end
  local first, sum = call('ZRANGE', lane, 0, TENANTS - 1), 0
  for _, tenant in ipairs(first) do sum = sum + share(g, call('HGET', B .. 'tenant:' .. tenant, 'weight')) end
  return floor(sum * n / #first)
end
local function reserved(g, except, now)
  local sum, equal = 0, math.max(1, floor(g.permits / math.max(1, g.active)))
  for _, typ in ipairs(call('ZREVRANGE', B .. 'types', 0, TYPES - 1)) do
    if typ ~= except then
      local load = call('HMGET', B .. 'load:' .. typ, 'waiting', 'full')
      local waiting = tonumber(load[1] or 0)
      if waiting > 0 and not is_stuck(load[2], now) and not is_paused('y', typ) then
        local fair, claim = B .. 'fair:' .. typ, 0
        for _, lane in ipairs({ 'high', 'normal', 'low' }) do claim = claim + shares_of(fair .. ':' .. lane, g, equal) end
        -- A stream that is full has room for so many when it is refilled.
        if load[2] then claim = math.min(claim, tonumber(string.match(load[2], '^%d+') or nil) or 0) end
        sum = sum + math.min(waiting, claim)
      end
    end
  end
  return sum
end
local function reserved_due(g, now, except)
  local sum, equal = 0, math.max(1, floor(g.permits / math.max(1, g.active)))
  for _, tenant in ipairs(call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, TENANTS)) do
    if tenant ~= except then sum = sum + math.min(equal, overdue(tenant, now)) end
  end
  return sum
end

-- Jobs that wait and parked jobs that are due compete for one tenant's permits: each side leaves the other half of them, and the odd one in turn.
local function odd() return floor(US / 1000 / WIDTH) % 2 end
local function half_for_due(n) return floor((n + odd()) / 2) end

-- rate_bound notes that somebody was denied a permit: what waits meanwhile waits for the rate, until no denial has come for two windows.
local function rate_bound(key, rs, rd, now)
  if rd and now - rd <= 2 * WIDTH then
    call('HSET', key, 'rd', now)
  else
    call('HSET', key, 'rs', now, 'rd', now)
  end
end
local function rate_since(rs, rd, now)
  if rd > 0 and now - rd <= 2 * WIDTH then return rs end
  return nil
end
