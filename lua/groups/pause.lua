-- pause: pauses or resumes a group, a tenant or a type. No job of it starts while it is paused;
-- jobs in flight finish.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  scope   -    group, tenant or type
--   2  id      -    the group, tenant or type
--   3  paused  0|1  1 pauses, 0 resumes
-- Reply
--   {'OK'}             it is paused or resumed, by this or an earlier call
--   {'NOGROUP'}        there is no such group
--   {'ENDED', status}  the group has ended
-- The waiting jobs of a paused group leave the fair queue; those of a paused tenant or type stay
-- there and are not dequeued. start suspends ready jobs that it meets. promote suspends due jobs of
-- a paused group or type that it meets; those of a paused tenant stay non-ready. After a
-- resumption, promote makes suspended jobs non-ready again, one batch in each call.
-- A group's pause is the field paused of its hash; a type's is in the hash pauses; a tenant's is in
-- both its own hash and the hash pauses.
-- Twice: the second call changes nothing.
-- Out of memory: goes through.
-- Cost: some commands for each type of the group; for a tenant, for each type, and with
-- FAIR_QUEUE_POLICY=priority for each of its groups; for a type, for each tenant with suspended
-- jobs.
local scope, id, paused = ARGV[1], ARGV[2], ARGV[3] == '1'
local now, factor = now_ms(), alpha()
precheck('SCARD', B .. 'suspended', B .. 'resuming')
precheck('HLEN', B .. 'rate')
precheck('LLEN', B .. 'wake:fetcher', B .. 'wake:dispatcher')

-- mark_resumed stores the time (ms) of this resumption in the field resumed of the hash rate, at
-- least 2 ms after the last one: promote looks only at suspended jobs with a score up to it, and
-- gives those that stay suspended the score resumed + 1.
local function mark_resumed()
  local last = tonumber(call('HGET', B .. 'rate', 'resumed') or 0)
  call('HSET', B .. 'rate', 'resumed', string.format('%.0f', math.max(now, last + 2)))
end
-- bring_back makes promote look at a tenant's suspended jobs, to make them non-ready again, and
-- wakes dispatcher and fetcher.
local function bring_back(tenant)
  if call('SISMEMBER', B .. 'suspended', tenant) == 1 then
    mark_resumed()
    call('SADD', B .. 'resuming', tenant)
  end
  wake('dispatcher')
  wake('fetcher')
end

if scope == 'group' then
  local key = B .. 'group:' .. id
  local g = call('HMGET', key, 'status', 'tenant', 'types', 'lane', 'paused')
  if not g[1] then return { 'NOGROUP' } end
  if g[1] == 'COMPLETED' or g[1] == 'FAILED' or g[1] == 'CANCELLED' then return { 'ENDED', g[1] } end
  if paused == (g[5] and true or false) then return { 'OK' } end
  local tenant, lane = g[2], g[4]
  local waiting, all = waiting_by_type(id, g[3], lane, tenant)
  precheck_activate(tenant)
  local scheduled = call('ZSCORE', B .. 'scheduled', id)
  allow_oom()
  if paused then
    call('HSET', key, 'paused', 1)
    if scheduled then return { 'OK' } end
    for typ in pairs(waiting) do withdraw(typ, lane, tenant, id) end
    activate(tenant, -all)
  else
    call('HDEL', key, 'paused')
    if not scheduled then
      enqueue_all(waiting, lane, tenant, id, now, factor)
      activate(tenant, all)
    end
    bring_back(tenant)
  end
elseif scope == 'tenant' then
  local key = B .. 'tenant:' .. id
  for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do
    for _, lane in ipairs(LANES) do precheck_enqueue(typ, lane, id) end
  end
  precheck('HLEN', B .. 'pauses')
  precheck('ZCARD', B .. 'non-ready', B .. 'non-ready:' .. id, B .. 'tenants', B .. 'groups:' .. id)
  precheck_activate(id)
  allow_oom()
  if paused then
    call('HSET', key, 'paused', 1)
    call('HSET', B .. 'pauses', 't:' .. id, 1)
    call('ZADD', B .. 'tenants', 0, id)
    set_inactive(id)
  elseif call('HDEL', B .. 'pauses', 't:' .. id) == 1 then
    call('HDEL', key, 'paused')
    if tonumber(call('HGET', key, 'active') or 0) > 0 then set_active(id) end
    for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do
      if not call('ZSCORE', B .. 'rate-limited:' .. typ, id) then enter_lanes(typ, id, factor) end
    end
    reindex(id)
    bring_back(id)
    forget_tenant(id)
  end
else
  precheck('HLEN', B .. 'pauses')
  allow_oom()
  if paused then
    call('HSET', B .. 'pauses', 'y:' .. id, 1)
  elseif call('HDEL', B .. 'pauses', 'y:' .. id) == 1 then
    if call('SCARD', B .. 'suspended') > 0 then
      mark_resumed()
      call('SUNIONSTORE', B .. 'resuming', B .. 'resuming', B .. 'suspended')
    end
    wake('dispatcher')
    wake('fetcher')
  end
end
return { 'OK' }
