-- setting: changes an operator's settings of a tenant. The next admission uses them. A tenant
-- without settings is forgotten if nothing else needs it (see parts/tenants.lua).
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  tenant         -    the tenant
--   2  rps            1/s  a rate limit of its own, '' = it shares the common limit
--   3  weight         n    its weight among tenants, '' = 1
--   4  base_priority  n    its part of the priority, '' = 0
--   5  in_flight      n    most entries of its jobs in ready streams, '' = no bound
--   6  kept           -    names of the settings that stay as they are, each with a | behind it
-- Reply
--   {'OK'}  the settings are stored
-- Twice: the second call stores the same settings. Calls that change different settings do not
-- undo each other.
-- Out of memory: refused.
-- Cost: some commands for each type, and for a new bound the length of the ready streams; with FAIR_QUEUE_POLICY=priority also for each group of the
-- tenant.
local tenant, kept, names = ARGV[1], ARGV[6], { 'rps', 'weight', 'base_priority', 'in_flight' }
local key, factor = B .. 'tenant:' .. tenant, alpha()
precheck_activate(tenant)
precheck('ZCARD', B .. 'tenants', B .. 'groups:' .. tenant)
precheck('LLEN', B .. 'wake:fetcher', B .. 'wake:dispatcher')
precheck('ZCARD', B .. 'non-ready')
local bounded = call('HEXISTS', key, 'in_flight') == 1
for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do
  precheck('ZCARD', B .. 'rate-limited:' .. typ)
  precheck_rerank(typ, factor)
end
call('ZADD', B .. 'tenants', 0, tenant)
local active = call('SISMEMBER', B .. 'active', tenant) == 1
if active then set_inactive(tenant) end
for i, name in ipairs(names) do
  local value = ARGV[i + 1]
  if not string.find(kept, name .. '|', 1, true) then
    if value == '' then call('HDEL', key, name) else call('HSET', key, name, value) end
  end
end
if call('HEXISTS', key, 'in_flight') == 0 then
  call('HDEL', key, 'places')
elseif not bounded then
  call('HSET', key, 'places', entries_of(tenant))
end
local held = call('HGET', key, 'held')
if held then come_back(tenant, held) end
if active then set_active(tenant) end
if factor then
  for _, group in ipairs(call('ZRANGE', B .. 'groups:' .. tenant, 0, -1)) do
    rerank(group, call('HGET', B .. 'group:' .. group, 'types') or '', factor)
  end
end
-- If the tenant was rate-limited by the old limit, admit looks at it again at once.
for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do
  if call('ZSCORE', B .. 'rate-limited:' .. typ, tenant) then call('ZADD', B .. 'rate-limited:' .. typ, 0, tenant) end
end
wake('fetcher')
forget_tenant(tenant)
return { 'OK' }
