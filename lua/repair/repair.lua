-- repair: corrects the counts of a group by what the audit has recounted, and the lists that name
-- it or its tenant. A group that may start enters the fair queue again. It makes the group dirty, and sweep begins again if a cancelled group has jobs left.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group    -  the group's id; '' = only the lists of the tenant
--   2  tenant   -  its tenant, or another one, whose list it leaves
--   3  version  n  the group's field repaired when the audit recounted it; 0 = not there
--   then for each count that is wrong:
--   +1  field   -  its name, or code:X for the jobs that failed with error code X
--   +2  delta   n  what is added to it
-- Reply
--   {'OK'}       the counts are corrected
--   {'VERSION'}  the group was repaired in the meantime: nothing was written
--   {'GONE'}     there is no such group: its id was removed from the lists of groups
-- Each transition changes counts and states alike. So the difference between them stays the same
-- until it is repaired, however often the group changes in the meantime.
-- Twice: the second call finds another version.
-- Out of memory: goes through.
-- Cost: constant; of a tenant with tags, 2 µs a tag.
local group, tenant, version, now = ARGV[1], ARGV[2], ARGV[3], now_ms()
local key, codes = B .. 'group:' .. group, B .. 'codes:' .. group
local g = call('HMGET', key, 'status', 'repaired', 'at:created', 'tenant', 'lane', 'types', 'paused', 'run_at',
  'tags')
precheck('ZCARD', B .. 'groups', B .. 'groups:' .. tenant, B .. 'open', B .. 'ended', B .. 'failed', B .. 'tenants',
  B .. 'scheduled', B .. 'non-ready', B .. 'non-ready:' .. tenant, B .. 'suspended:' .. tenant)
precheck('SCARD', B .. 'suspended', B .. 'resuming')
-- own are the tags of the group; others those of the tenant, at most 1,000, that it does not have.
local own, others = g[4] == tenant and g[9] or nil, {}
for _, pair in ipairs(call('SMEMBERS', B .. 'tags:' .. tenant)) do
  if not string.find('\n' .. (own or '') .. '\n', '\n' .. pair .. '\n', 1, true) then others[#others + 1] = pair end
end
others = table.concat(others, '\n')
precheck_tags(tenant, own)
precheck_tags(tenant, others)
precheck('HLEN', B .. 'rate')
precheck('LLEN', B .. 'wake:dispatcher', B .. 'wake:fetcher')
precheck_mark_dirty()
local lane, factor, waiting = g[5] or 'normal', alpha(), {}
if g[4] == tenant then waiting = waiting_by_type(group, g[6], lane, tenant) end
if g[1] and (g[2] or '0') ~= version then return { 'VERSION' } end
precheck('HLEN', codes)
allow_oom()
if not call('ZSCORE', B .. 'non-ready', tenant) then reindex(tenant) end
if call('ZCARD', B .. 'suspended:' .. tenant) > 0 and call('SADD', B .. 'suspended', tenant) == 1 then
  call('SADD', B .. 'resuming', tenant) -- promote suspends those again that are still paused
  local last = tonumber(call('HGET', B .. 'rate', 'resumed') or 0)
  call('HSET', B .. 'rate', 'resumed', string.format('%.0f', math.max(now, last + 2))) -- as mark_resumed of pause
  wake('dispatcher')
end
untag(tenant, group, others)
if not g[1] then
  for _, list in ipairs({ 'groups', 'groups:' .. tenant, 'open', 'ended', 'failed', 'scheduled' }) do
    call('ZREM', B .. list, group)
  end
  call('SREM', B .. 'dirty', group)
  return { 'GONE' }
end
if g[4] and g[4] ~= tenant then
  call('ZREM', B .. 'groups:' .. tenant, group)
  return { 'OK' }
end
for i = 4, #ARGV, 2 do
  local code = string.match(ARGV[i], '^code:(.+)$')
  if not code then
    call('HINCRBY', key, ARGV[i], ARGV[i + 1])
  elseif call('HINCRBY', codes, code, ARGV[i + 1]) == 0 then
    call('HDEL', codes, code)
  end
end
call('HINCRBY', key, 'repaired', 1)

local status, created = g[1], tonumber(g[3] or now)
local ended = status == 'COMPLETED' or status == 'FAILED' or status == 'CANCELLED'
local left = call('HMGET', key, 'sweep', 'at:' .. string.lower(status), 'waiting', 'non_ready', 'ready', 'in_flight')
if status == 'CANCELLED' and not left[1] then -- sweep has ended, but jobs are left
  for i = 3, 6 do
    if tonumber(left[i] or 0) > 0 then left[1] = 0 end
  end
  if left[1] then call('HSET', key, 'sweep', 0) end
end
call('ZADD', B .. 'groups', 'NX', created, group)
call('ZADD', B .. 'groups:' .. tenant, 'NX', created, group)
call('ZADD', B .. 'tenants', 0, tenant)
tag(tenant, group, own, call('ZSCORE', B .. 'groups:' .. tenant, group))
if ended and not left[1] then
  call('ZREM', B .. 'open', group)
  call('ZADD', B .. 'ended', 'NX', tonumber(left[2] or now), group)
else
  call('ZREM', B .. 'ended', group)
  call('ZADD', B .. 'open', 'NX', created, group)
end
if status == 'FAILED' then
  call('ZADD', B .. 'failed', 'NX', tonumber(left[2] or now), group)
else
  call('ZREM', B .. 'failed', group)
end
if not ended and not g[7] and not call('ZSCORE', B .. 'scheduled', group) then
  if tonumber(g[8] or 0) > now then
    call('ZADD', B .. 'scheduled', g[8], group)
  else
    for typ, n in pairs(waiting) do
      local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
      if n > 0 then enqueue(typ, lane, tenant, group, call('ZSCORE', of, group) and 0 or n, now, factor) end
    end
    wake('fetcher')
  end
end
mark_dirty(group)
return { 'OK' }
