-- limiters: the mathematics of three rate limiters. It knows nothing of jobs or tenants.
-- The state of a limit is two fields of a hash, one hash however many windows pass.
-- NEEDS  base
-- SETS
--   LIMITER    the kind that the script uses: fixed, sliding or token
--   WIDTH      length of a window, ms
--   US         the time by which the limiters decide, µs
-- OFFERS
--   LIMIT_FIELDS[kind]                names of the two fields
--   left[kind](key, a, b, permits)    permits that are left, µs of the next one, state for spend
--   spend[kind](key, state, n)        takes n permits

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
