-- tenants: which tenants are active, and when what is known of a tenant is dropped.
-- NEEDS  base
-- OFFERS
--   precheck_activate(tenant)    reads the keys that the others write
--   activate(tenant, n)          counts n more jobs that want a permit
--   set_active(tenant)           adds the tenant to the active ones
--   set_inactive(tenant)         removes the tenant from them
--   extra_weight(weight)         what a tenant weighs beyond 1, in thousandths
--   forget_tenant(tenant)        drops a tenant that has neither groups nor settings
--   check_last(tenant)           drops the counters of a tenant without unfinished jobs

-- activate counts n more (or fewer) jobs of a tenant that want a permit; a tenant is active while it has some and is not paused.
-- Each active tenant weighs 1 in the division of the limit; rate.xw holds what others weigh beyond that, in thousandths.
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
local function set_inactive(tenant)
  if call('SREM', B .. 'active', tenant) == 0 then return end
  add(B .. 'rate', 'xw', -extra_weight(call('HGET', B .. 'tenant:' .. tenant, 'weight')))
end
local function activate(tenant, n)
  if n == 0 then return end
  local left = call('HINCRBY', B .. 'tenant:' .. tenant, 'active', n)
  if left > 0 and left <= n then set_active(tenant) end
  if left <= 0 then set_inactive(tenant) end
end

-- forget_tenant drops what is known of a tenant that has neither groups nor settings.
local function forget_tenant(tenant)
  local key = B .. 'tenant:' .. tenant
  local set = call('HMGET', key, 'rps', 'weight', 'base_priority', 'paused', 'unfinished')
  if set[1] or set[2] or set[3] or set[4] or tonumber(set[5] or 0) > 0 or call('ZCARD', B .. 'groups:' .. tenant) > 0 then return end
  call('UNLINK', key)
  call('ZREM', B .. 'tenants', tenant)
end

-- check_last lets a tenant without unfinished jobs out of the active set at once; its congestion starts afresh.
local function check_last(tenant)
  local key = B .. 'tenant:' .. tenant
  if tonumber(call('HGET', key, 'unfinished') or 0) > 0 or call('ZCARD', B .. 'non-ready:' .. tenant) > 0 then return end
  set_inactive(tenant)
  call('HDEL', key, 'active', 'congested')
  call('UNLINK', B .. 'congestion:' .. tenant)
  -- What is known of its types goes when these have become many.
  if call('HLEN', key) < 100 then return end
  for _, field in ipairs(call('HKEYS', key)) do
    if string.find(field, '^est:') or string.find(field, '^owe:') or string.find(field, '^tag:') then call('HDEL', key, field) end
  end
end
