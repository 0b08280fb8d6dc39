-- quota: changes or reads the quota of a partition, and from then on refuses calls with a smaller
-- fencing number. One process at a time rebalances quota (see lead). It adds to a partition only
-- what it has taken from another one before.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  fence       n        fencing number of the quota rebalancer
--   2  limiter     -        fixed, sliding or token
--   3  width       ms       length of a window
--   4  total       permits  permits in a window, of all partitions together
--   5  part        permits  this partition's quota until it is rebalanced
--   6  tag         -        name of the limit and of the number of partitions: a quota stored under
--                           another tag counts as not yet rebalanced
--   7  to          permits  the new quota; -1 = leave it as it is
--   8  not_before  µs       an increase is not effective in full before this time; with the limiter
--                           token it always is at once
--   9  at_once     permits  part of the increase that is effective at once
-- Reply
--   {'OK', held, freed, from, demand, active}
--               held    permits of the limit that this partition may use or has used
--               freed   permits that this call took, and that other partitions may have at once
--               from    µs from which on the last change of the quota is effective in full, 0 =
--                       it is; after a decrease with fixed, others may then have all that it lost
--               demand  waiting and due jobs that could use permits, of at most 64 types and 16
--                       tenants with due jobs
--               active  number of the partition's active tenants
--   {'FENCED'}  another process, with a higher fencing number, rebalances
-- A decrease is effective at once. Permits that were spent in this window (fixed) count until it
-- ends. Permits that were spent in the last window (sliding) count less and less. Only the others
-- can be given away. With the token limiter the permits in the bucket stay, as far as they fit.
-- Twice: the second call changes nothing, and answers freed = 0.
-- Out of memory: goes through.
-- Cost: some commands for each type and each tenant with due jobs.
local fence, part, tag = tonumber(ARGV[1]), tonumber(ARGV[5]), ARGV[6]
local to, not_before, at_once = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
LIMITER, WIDTH = ARGV[2], tonumber(ARGV[3])
US = now_us()
local now, key, width = floor(US / 1000), B .. 'rate', WIDTH * 1000
local F = LIMIT_FIELDS[LIMITER]
local h = call('HMGET', key, 'qx', 'qt', 'q', 'q2', 'qf', F[1], F[2])
if tonumber(h[1] or 0) > fence then return { 'FENCED' } end
local q, q2, from, freed = part, nil, 0, 0
if h[2] == tag then
  q, q2, from = tonumber(h[3]), tonumber(h[4] or nil), tonumber(h[5] or 0)
  if q2 and US >= from then q, q2 = q2, nil end
end
allow_oom()
call('HSET', key, 'qx', fence)
if to >= 0 and to ~= (q2 or q) then
  local old = q
  if LIMITER == 'token' then
    local debt = math.max(0, math.min(width, tonumber(h[6] or 0) - US))
    local tokens = math.min(to, (width - debt) / width * old)
    call('HSET', key, 't', string.format('%.2f', to > 0 and US + width - tokens / to * width or US + width))
    q, q2, freed = to, nil, math.max(0, old - to)
  elseif to < q then
    local used = 0
    if q > 0 then used = q - left[LIMITER](key, h[6], h[7], q) end
    q, q2, freed = to, nil, math.max(0, old - math.max(to, used))
    if used > to and LIMITER == 'fixed' then q2, from = to, US - US % width + width end
  elseif US >= not_before then
    q, q2 = to, nil
  else
    q, q2, from = q + at_once, to, not_before
  end
  call('HSET', key, 'qt', tag, 'q', q)
  if q2 then call('HSET', key, 'q2', q2, 'qf', string.format('%.0f', from)) else call('HDEL', key, 'q2', 'qf') end
end
if not q2 then from = 0 end
-- Permits that were spent within the last window count, even if the quota is smaller by now.
local held = q
if LIMITER == 'sliding' then
  local s = call('HMGET', key, F[1], F[2])
  held = math.max(q, 0 - left.sliding(key, s[1], s[2], 0))
end

-- Jobs that could use permits: those that wait or are due.
local demand = 0
for _, typ in ipairs(call('ZREVRANGE', B .. 'types', 0, TYPES - 1)) do
  local load = call('HMGET', B .. 'load:' .. typ, 'waiting', 'full')
  if not is_stuck(load[2], now) and not is_paused('y', typ) then
    demand = demand + math.max(0, tonumber(load[1] or 0))
  end
end
for _, tenant in ipairs(call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, TENANTS)) do
  demand = demand + call('ZCOUNT', B .. 'non-ready:' .. tenant, '-inf', now)
end
if call('SCARD', B .. 'active') == 0 and call('ZCOUNT', B .. 'non-ready', '-inf', now) == 0 then demand = 0 end
return { 'OK', held, freed, from, demand, call('SCARD', B .. 'active') }
