-- tenant_state: what a tenant is, has and may right now. It changes nothing but what a clock that was set back has spoilt.
-- KEYS  base
-- ARGV  tenant, limiter, window ms, permits a window of all partitions (0 = no limit), this partition's first part, tag of the division
-- Reply {known, rps, weight, base priority, paused, active, wanting, unfinished, non-ready, next due ms, pace (two marks of ms and count), ended,
--        throttles, returns, waited ms, longest wait ms, last event ms, used, limit, global used, global limit, active tenants, next permit µs, global permit µs, now µs, limited_until until ms}
-- Twice: the same. Goes through when memory is full. Cost: constant, and the types.
local tenant, total = ARGV[1], tonumber(ARGV[4])
LIMITER, WIDTH = ARGV[2], tonumber(ARGV[3])
US = now_us()
local key, F = B .. 'tenant:' .. tenant, LIMIT_FIELDS[LIMITER]
local h = call('HMGET', key, F[1], F[2], 'rps', 'weight', 'base_priority', 'paused', 'active', 'unfinished', 'pace', 'ended')
local c = call('HMGET', B .. 'congestion:' .. tenant, 'throttles', 'returns', 'waited', 'longest', 'last')
local active = call('SISMEMBER', B .. 'active', tenant)
local first = call('ZRANGE', B .. 'non-ready:' .. tenant, 0, 0, 'WITHSCORES')
local limited_until = 0
for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do
  limited_until = math.max(limited_until, tonumber(call('ZSCORE', B .. 'rate-limited:' .. typ, tenant) or 0))
end
local g = { permits = 0, active = call('SCARD', B .. 'active') }
local used, limit, next_at, global_used, global_next = 0, 0, US, 0, US
if total > 0 then
  g = global(total, tonumber(ARGV[5]), ARGV[6])
  count_due(g, floor(US / 1000))
  if active == 0 then g.active = g.active + 1 end
  global_used, global_next = g.permits - g.left, g.left > 0 and US or g.next_at
  limit = share(g, h[4])
end
if h[3] then limit = own_limit(h[3]) end
if limit > 0 then
  local n, at = left[LIMITER](key, h[1], h[2], limit)
  used, next_at = math.max(0, limit - n), n > 0 and US or at
end
local known = call('ZSCORE', B .. 'tenants', tenant) and 1 or 0
return { known, h[3] or '', h[4] or '', h[5] or '', h[6] and 1 or 0, active, tonumber(h[7] or 0), tonumber(h[8] or 0),
  call('ZCARD', B .. 'non-ready:' .. tenant) + call('ZCARD', B .. 'suspended:' .. tenant), first[2] and string.format('%.0f', first[2]) or '0', h[9] or '', h[10] or '0',
  c[1] or '0', c[2] or '0', c[3] or '0', c[4] or '0', c[5] or '0',
  used, limit, global_used, g.permits, g.active, math.floor(next_at), math.floor(global_next), US, limited_until }
