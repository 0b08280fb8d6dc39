-- fair_queue: groups and tenants enter the fair queue and leave it.
-- NEEDS  base, priority
-- OFFERS
--   AGE_MS                                               age that weighs as much as a job
--   precheck_enqueue(typ, lane, tenant)                  reads the keys that the others write
--   enter_lane(typ, lane, tenant)                        a tenant enters a lane
--   leave_lane(typ, lane, tenant, own)                   a tenant leaves a lane
--   in_lane(typ, lane, tenant)                           the tenant's start tag, or nil
--   enqueue(typ, lane, tenant, group, n, now, factor)    a group with n waiting jobs enters
--   withdraw(typ, lane, tenant, group)                   a group leaves

-- Least remaining work with aging: each waiting job of a group counts as much as this age (ms).
local AGE_MS = 100

-- enqueue puts n waiting jobs' worth of a group into its tenant's fair queue, and the tenant into the lane.
-- A tenant that returns starts at max(own tag, the lane's virtual time): idling earns nothing and costs nothing. A tag belongs to one life
-- of its type (gen, see retire): one from an earlier life says nothing.
local function precheck_enqueue(typ, lane, tenant)
  precheck('HLEN', B .. 'fair:' .. typ, B .. 'tenant:' .. tenant)
  precheck('ZCARD', B .. 'fair:' .. typ .. ':' .. lane, B .. 'over:' .. typ .. ':' .. lane, B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant,
    B .. 'rate-limited:' .. typ, B .. 'priority:' .. typ)
end
local function enter_lane(typ, lane, tenant)
  local own = call('HGET', B .. 'tenant:' .. tenant, 'tag:' .. typ .. ':' .. lane)
  local f = call('HMGET', B .. 'fair:' .. typ, 'v:' .. lane, 'gen')
  local tag = tonumber(f[1] or 0)
  if own then
    local gen, at = string.match(own, '^(%d+) (.+)$')
    if gen == (f[2] or '0') then tag = math.max(tag, tonumber(at) or 0) end
  end
  call('ZADD', B .. 'fair:' .. typ .. ':' .. lane, tag, tenant)
end
local function leave_lane(typ, lane, tenant, own)
  local gen = call('HGET', B .. 'fair:' .. typ, 'gen') or '0'
  call('HSET', B .. 'tenant:' .. tenant, 'tag:' .. typ .. ':' .. lane, gen .. ' ' .. own)
  call('ZREM', B .. 'fair:' .. typ .. ':' .. lane, tenant)
  call('ZREM', B .. 'over:' .. typ .. ':' .. lane, tenant)
end
-- in_lane is a tenant's start tag, be it among those with permits of their own or among those that borrow.
local function in_lane(typ, lane, tenant)
  return call('ZSCORE', B .. 'fair:' .. typ .. ':' .. lane, tenant) or call('ZSCORE', B .. 'over:' .. typ .. ':' .. lane, tenant)
end

local function enqueue(typ, lane, tenant, group, n, now, factor)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  if not call('ZSCORE', of, group) then call('ZADD', of, now, group) end
  call('ZINCRBY', of, n * AGE_MS, group)
  if call('ZSCORE', B .. 'rate-limited:' .. typ, tenant) then return end
  if factor then call('ZADD', B .. 'priority:' .. typ, rank(group, factor), group) end
  if not in_lane(typ, lane, tenant) then enter_lane(typ, lane, tenant) end
end
-- withdraw takes a group's waiting jobs of a type out of the fair queue; the jobs stay where they are.
local function withdraw(typ, lane, tenant, group)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  call('ZREM', B .. 'priority:' .. typ, group)
  if call('ZREM', of, group) == 0 or call('ZCARD', of) > 0 then return end
  local own = in_lane(typ, lane, tenant)
  if own then leave_lane(typ, lane, tenant, own) end
end
