-- tenants: which tenants are active, and when the hash of a tenant or parts of it are deleted.
-- NEEDS  base
-- OFFERS
--   precheck_activate(tenant)    reads the keys that activate, set_active and set_inactive write
--   activate(tenant, n, weight)  counts n more jobs that want a permit
--   set_active(tenant)           adds the tenant to the active ones, unless it is paused
--   set_inactive(tenant, weight) removes the tenant from them
--   extra_weight(weight)         the weight minus 1, in thousandths; without a weight 0
--   forget_tenant(tenant)        deletes a tenant without groups, settings, pause, unfinished jobs
--   precheck_last(tenant)        reads the keys that check_last writes
--   check_last(tenant)           makes a tenant without unfinished or non-ready jobs inactive and
--                                deletes its counters

-- A tenant is active while it has jobs that want a permit and is not paused. The limit is divided
-- among active tenants by weight: the sum of their weights is their number plus a thousandth of the
-- field xw of the hash rate, which is the sum of extra_weight.
local function precheck_activate(tenant)
  precheck('HLEN', B .. 'tenant:' .. tenant, B .. 'rate')
  precheck('SCARD', B .. 'active')
end
local function extra_weight(weight) return floor((tonumber(weight or 1) - 1) * 1000 + 0.5) end
local function set_active(tenant)
  local t = call('HMGET', B .. 'tenant:' .. tenant, 'weight', 'paused')
  if t[2] or call('SADD', B .. 'active', tenant) == 0 then return end
  add(B .. 'rate', 'xw', extra_weight(t[1]))
end
local function set_inactive(tenant, weight)
  if call('SREM', B .. 'active', tenant) == 0 then return end
  add(B .. 'rate', 'xw', -extra_weight(weight or call('HGET', B .. 'tenant:' .. tenant, 'weight')))
end

-- activate adds n, which may be negative, to the number of a tenant's jobs that want a permit. The
-- tenant becomes active with its first such job, and inactive with its last one. weight is the
-- tenant's weight, if the caller knows it.
local function activate(tenant, n, weight)
  if n == 0 then return end
  local left = call('HINCRBY', B .. 'tenant:' .. tenant, 'active', n)
  if left > 0 and left <= n then set_active(tenant) end
  if left <= 0 then set_inactive(tenant, weight) end
end

-- forget_tenant deletes the hash of a tenant and removes the tenant from the sorted set tenants. It
-- keeps a tenant that has groups, settings or unfinished jobs, or is paused.
local function forget_tenant(tenant)
  local key = B .. 'tenant:' .. tenant
  local set = call('HMGET', key, 'rps', 'weight', 'base_priority', 'paused', 'unfinished', 'in_flight')
  if set[1] or set[2] or set[3] or set[4] or set[6] or tonumber(set[5] or 0) > 0 then return end
  if call('ZCARD', B .. 'groups:' .. tenant) > 0 then return end
  call('UNLINK', key)
  call('ZREM', B .. 'tenants', tenant)
end

-- check_last is called when a group of the tenant has ended. If the tenant has neither unfinished
-- nor non-ready jobs, check_last makes it inactive, and deletes its counters active and congested
-- and its congestion statistics; a large hash loses its fields for each type, too.
local function precheck_last(tenant)
  precheck_activate(tenant)
  precheck('ZCARD', B .. 'non-ready:' .. tenant)
end
local function check_last(tenant)
  local key = B .. 'tenant:' .. tenant
  local t = call('HMGET', key, 'unfinished', 'active', 'congested')
  if tonumber(t[1] or 0) > 0 or prechecked[B .. 'non-ready:' .. tenant] > 0 then return end
  if t[3] or tonumber(t[2] or 0) ~= 0 then
    set_inactive(tenant)
    call('HDEL', key, 'active', 'congested')
    call('UNLINK', B .. 'congestion:' .. tenant)
  end
  -- The hash of a tenant with jobs of many types has fields for each type. When it is large, delete
  -- these fields.
  if prechecked[key] < 100 then return end
  for _, field in ipairs(call('HKEYS', key)) do
    if string.find(field, '^est:') or string.find(field, '^owe:') or string.find(field, '^tag:') then
      call('HDEL', key, field)
    end
  end
end
