-- tenant_state: reads the limits, the usage and the queue of a tenant.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  tenant   -        the tenant
--   2  limiter  -        fixed, sliding or token
--   3  width    ms       length of a window
--   4  other    0|1      1 = reply as if the settings 5 and 6 were the tenant's
--   5  rps      1/s      with other: a rate limit of its own, '' = it shares the common limit
--   6  weight   n        with other: its weight, '' = 1
-- Reply
--   1   known          0|1      the tenant has groups or settings, or is paused
--   2   rps            1/s      its own rate limit, '' = none
--   3   weight         n        its weight, '' = 1
--   4   base_priority  n        its part of the priority, '' = 0
--   5   paused         0|1
--   6   active         0|1      it is in the set of active tenants
--   7   wanted         jobs     jobs that want a permit
--   8   unfinished     jobs     jobs that have not ended
--   9   non_ready      jobs     non-ready jobs, suspended ones too
--   10  pace           -        two marks of time (ms) and ended, for its present speed
--   11  ended          jobs     jobs that workers reported done or failed, in any group
--   12  throttles      n        times that one of its jobs became the marker, for want of a permit
--   13  returns        n        times that one of its jobs was retried or throttled
--   14  waited         ms       sum of the waits that these retries and throttles set
--   15  longest        ms       the longest of these waits
--   16  last           ms       time of the last event that 12 or 13 counts, 0 = none
--                               (12 to 16 begin again after some time without such events, or when
--                               the tenant's last group ends)
--   17  used           permits  permits that it has spent of 18: in this window (fixed), in the
--                               last width (sliding), or not refilled yet (token)
--   18  limit          permits  its own limit or share, in a window; 0 = no limit
--   19  global_used    permits  permits that all tenants of the partition have spent of 20
--   20  global_limit   permits  permits that they may spend in a window; 0 = no limit, or the
--                               partition has no quota now
--   21  active_tenants n        active tenants; with a global limit also this one, and up to 16
--                               others that have due jobs
--   22  next_permit    µs       time of the tenant's next permit; now, if it has one left or no
--                               limit
--   23  global_permit  µs       time of the partition's next permit; now, if one is left, or
--                               without a limit
--   24  now            µs       Redis time
--   25  limited_until  ms       until then it is rate-limited (the latest time of all types); 0 =
--                               it is not
--   26  in_flight      n        its bound of jobs in flight, '' = none
--   27  places         n        with a bound: how many of its jobs count
--   28  total          permits  the global limit of all partitions together, in a window; 0 = none
--   29  share          -        static or elastic
-- It changes nothing, except for the state of a limiter whose time is too far in the future: the
-- clock was set back, or with token the tenant has borrowed permits.
-- Twice: the second call answers again.
-- Out of memory: goes through, unless it has to change that state.
-- Cost: constant, and one command for each type.
local tenant = ARGV[1]
LIMITER, WIDTH = ARGV[2], tonumber(ARGV[3])
US = now_us()
local key, F = B .. 'tenant:' .. tenant, LIMIT_FIELDS[LIMITER]
local h = call('HMGET', key, F[1], F[2], 'rps', 'weight', 'base_priority', 'paused', 'active', 'unfinished', 'pace',
  'ended', 'in_flight', 'places')
local c = call('HMGET', B .. 'congestion:' .. tenant, 'throttles', 'returns', 'waited', 'longest', 'last')
local rps, weight = h[3], h[4]
if ARGV[4] == '1' then rps, weight = ARGV[5] ~= '' and ARGV[5], ARGV[6] ~= '' and ARGV[6] or nil end
local active = call('SISMEMBER', B .. 'active', tenant)
local limited_until = 0
for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do
  limited_until = math.max(limited_until, tonumber(call('ZSCORE', B .. 'rate-limited:' .. typ, tenant) or 0))
end
local g = global()
local used, limit, next_at, global_used, global_next = 0, 0, US, 0, US
if g.limited then
  count_due(g, floor(US / 1000), tenant)
  if active == 0 then g.active = g.active + 1 else g.xw = g.xw - extra_weight(h[4]) end
  g.xw = g.xw + extra_weight(weight)
  global_used, global_next = g.permits - g.left, g.left > 0 and US or g.next_at
  limit = share(g, weight)
end
if rps then limit = own_limit(rps) end
if limit > 0 then
  local n, at = left[LIMITER](key, h[1], h[2], limit)
  used, next_at = math.max(0, limit - n), n > 0 and US or at
end
local known = call('ZSCORE', B .. 'tenants', tenant) and 1 or 0
return { known, rps or '', weight or '', h[5] or '', h[6] and 1 or 0, active, tonumber(h[7] or 0), tonumber(h[8] or 0),
  call('ZCARD', B .. 'non-ready:' .. tenant) + call('ZCARD', B .. 'suspended:' .. tenant),
  h[9] or '', h[10] or '0',
  c[1] or '0', c[2] or '0', c[3] or '0', c[4] or '0', c[5] or '0',
  used, limit, global_used, g.permits, g.active, math.floor(next_at), math.floor(global_next), US, limited_until,
  h[11] or '', tonumber(h[12] or 0), g.total, g.elastic and 'elastic' or 'static' }
