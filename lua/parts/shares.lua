-- shares: how a partition's limit is divided among tenants.
-- NEEDS  base, limiters, pauses, ready, tenants
-- OFFERS
--   TYPES                           most types that a script looks at
--   TENANTS                         most due tenants that a script looks at
--   quota_now(q, q2, qf)            the quota that holds now
--   global(typ)                     the partition's limit, and what is left of it
--   type_limit(typ, spec)           the limits of a type, and what is left of them
--   room(T, entries)                how many of its jobs may become ready now
--   room_of(typ, types)             the same, of a type whose limits were not read
--   startable(g)                    waiting jobs that the limits of their types allow to start
--   count_due(g, now, except)       counts tenants with due jobs as active, in g, but not except;
--                                   returns whether there are any due jobs
--   share(g, weight)                the share of a tenant, permits a window
--   own_limit(rps)                  the tenant's own limit, permits a window
--   permits_of(g, rps, weight, whole)
--                                   what a tenant may spend, permits a window
--   overdue(tenant, now)            jobs of a tenant that have been due for 20 ms and longer
--   reserved(g, except, now)        permits that waiting jobs of types other than except may claim,
--                                   as far as the limits of these types allow it
--   reserved_due(g, now, except)    permits that due jobs of tenants other than except may claim
--   half_for_due(n)                 the part of n permits for jobs that are due
--   rate_bound(key, rd, now)        stores that a permit was denied
--   rate_since(rs, rd, now)         since when permits are denied, or nil

-- Bounds of a script's cost.
local TYPES, TENANTS = 64, 16

-- quota_now returns the quota that holds now: q, or q2 from qf (µs) on; 0 without one.
local function quota_now(q, q2, qf)
  if q2 and US >= tonumber(qf) then return tonumber(q2) end
  return tonumber(q or 0)
end

-- left_of does the same as left (see limiters), also for a quota of 0, which has no state for spend.
local function left_of(key, a, b, permits)
  if permits <= 0 then return 0, US + WIDTH * 1000 end
  return left[LIMITER](key, a, b, permits)
end

-- global reads the hash rate, which quota writes. It returns g: whether there is a limit (limited),
-- the limit of all partitions (total), whether tenants may borrow (elastic), the partition's permits
-- a window (permits), how many of them are left, when (µs) the next one comes (next_at), the state
-- for spend, the fields xw, rs and rd, the types with limits of their own (types, 'A|B', or nil), the
-- limits of typ (spec, see type_limit), and the number of active tenants (active), without those whose
-- jobs are all held up by limits of their types. Without a limit,
-- left, next_at and state are nil. state is nil too if the partition's quota is 0: then left is 0.
-- In a partition where quota was never called, unset is true: nothing may start.
local function global(typ)
  local f = LIMIT_FIELDS[LIMITER]
  local h = call('HMGET', B .. 'rate', f[1], f[2], 'xw', 'rs', 'rd', 'total', 'q', 'q2', 'qf', 'share', 'types',
    'type:' .. (typ or ''), 'qt', 'idle', 'idle_xw')
  -- Before layout 3 the limit was only in the tag qt.
  local total = h[6] or string.match(h[13] or '', '^%d+')
  local g = {
    unset = not total, total = tonumber(total or 0), elastic = h[10] == 'elastic', permits = 0,
    xw = tonumber(h[3] or 0) - tonumber(h[15] or 0), rs = tonumber(h[4] or 0), rd = tonumber(h[5] or 0), types = h[11], spec = h[12],
    active = math.max(0, call('SCARD', B .. 'active') - tonumber(h[14] or 0)),
  }
  g.limited = g.total > 0
  if not g.limited then return g end
  g.permits = quota_now(h[7], h[8], h[9])
  g.left, g.next_at, g.state = left_of(B .. 'rate', h[1], h[2], g.permits)
  return g
end

-- type_limit returns the limits of a type, or nil if it has none. spec is what the field type:TYPE of
-- the hash rate says: whether the type has a rate (0 or 1), and its places in this partition (- = no
-- bound). The fields of the result: places; and of the rate, as in global: key, permits, left, next_at,
-- state, rs, rd. A type without a rate has always permits left.
local function type_limit(typ, spec)
  if not spec then return nil end
  local rated, places = string.match(spec, '^(%d) (%S+)$')
  local T = { key = B .. 'rate:' .. typ, places = tonumber(places), left = math.huge, rs = 0, rd = 0 }
  if rated ~= '1' then return T end
  local f = LIMIT_FIELDS[LIMITER]
  local h = call('HMGET', T.key, f[1], f[2], 'q', 'q2', 'qf', 'rs', 'rd')
  T.permits, T.rs, T.rd = quota_now(h[3], h[4], h[5]), tonumber(h[6] or 0), tonumber(h[7] or 0)
  T.left, T.next_at, T.state = left_of(T.key, h[1], h[2], T.permits)
  return T
end

-- room returns how many jobs of a type may become ready now, by its limits: T is what type_limit
-- returned, entries is the length of its ready stream.
local function room(T, entries)
  return math.max(0, math.min(T.left, (T.places or math.huge) - entries))
end

-- room_of reads the limits of a type and returns its room. Without limits it is infinite. types is
-- g.types: without it the function reads nothing.
local function room_of(typ, types)
  local T = types and type_limit(typ, call('HGET', B .. 'rate', 'type:' .. typ))
  return T and room(T, call('XLEN', B .. 'ready:' .. typ)) or math.huge
end

-- startable returns how many waiting jobs of all types the limits of their types allow to start now,
-- about. Without such limits it is infinite.
local function startable(g)
  if g.types and not g.startable then
    g.startable = 0
    for _, typ in ipairs(call('ZREVRANGE', B .. 'types', 0, TYPES - 1)) do
      local waiting = tonumber(call('HGET', B .. 'load:' .. typ, 'waiting') or 0)
      if waiting > 0 then g.startable = g.startable + math.min(waiting, room_of(typ, g.types)) end
    end
  end
  return g.startable or math.huge
end

-- count_due returns whether any non-ready jobs are due. Their tenants could use permits now, so it
-- adds those that are not active to the number g.active, up to TENANTS of them, but not the tenant
-- except. It does not write the set active.
local function count_due(g, now, except)
  local due = call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, TENANTS)
  for _, tenant in ipairs(due) do
    if tenant ~= except and call('SISMEMBER', B .. 'active', tenant) == 0 then g.active = g.active + 1 end
  end
  return #due > 0
end

-- share returns a tenant's part of the permits a window, by weight; at least 1.
local function share(g, weight)
  local w = 1000 + extra_weight(weight)
  local all = 1000 * g.active + g.xw
  return math.max(1, floor(g.permits * w / math.max(w, all)))
end

-- own_limit converts the rate limit of a tenant that has one, rps (permits a second), to whole
-- permits a window, at least 1. rps may not be nil.
local function own_limit(rps) return math.max(1, floor(tonumber(rps) * WIDTH / 1000)) end

-- permits_of returns what a tenant may spend in a window: its own limit; or, if whole is set, all
-- permits of the partition; or its share. With a global limit it is never more than the
-- permits of the partition, but at least 1; without one, the tenant must have a limit of its own.
local function permits_of(g, rps, weight, whole)
  if not g.limited then return own_limit(rps) end
  local permits = rps and own_limit(rps) or whole and g.permits or share(g, weight)
  return math.min(permits, math.max(1, g.permits))
end

-- overdue counts a tenant's non-ready jobs that have been due for GRACE_MS or longer: promote has
-- had the time to make them ready, so they probably lack a permit. Permits are kept for them. A
-- permit that is kept for a job that became due later could be lost, if permits come one at a time.
local overdue
do
  local GRACE_MS = 20
  function overdue(tenant, now) return call('ZCOUNT', B .. 'non-ready:' .. tenant, '-inf', now - GRACE_MS) end
end

-- reserved estimates how many permits tenants with waiting jobs of types other than except may
-- claim: a share for each tenant that has not spent its own, but no more than the type's waiting
-- jobs, and if its ready stream is full, no more than half of its cap. Paused and stuck types claim
-- none. reserved_due counts the permits that overdue jobs may claim: at most an equal share for
-- each of the first TENANTS tenants but except. Others may borrow only the permits beyond these.
local reserved
do
  local function shares_of(lane, g, equal)
    local n = call('ZCARD', lane)
    if g.xw == 0 or n == 0 then return n * equal end
    local first, sum = call('ZRANGE', lane, 0, TENANTS - 1), 0
    for _, tenant in ipairs(first) do sum = sum + share(g, call('HGET', B .. 'tenant:' .. tenant, 'weight')) end
    return floor(sum * n / #first)
  end
  function reserved(g, except, now)
    local sum, equal = 0, math.max(1, floor(g.permits / math.max(1, g.active)))
    for _, typ in ipairs(call('ZREVRANGE', B .. 'types', 0, TYPES - 1)) do
      if typ ~= except then
        local load = call('HMGET', B .. 'load:' .. typ, 'waiting', 'full')
        local waiting = tonumber(load[1] or 0)
        if waiting > 0 and not is_stuck(load[2], now) and not is_paused('y', typ) then
          local fair, claim = B .. 'fair:' .. typ, 0
          for _, lane in ipairs({ 'high', 'normal', 'low' }) do
            claim = claim + shares_of(fair .. ':' .. lane, g, equal)
          end
          -- By refill, a full ready stream counts as full until it has at most this many
          -- undelivered jobs.
          if load[2] then claim = math.min(claim, tonumber(string.match(load[2], '^%d+') or nil) or 0) end
          sum = sum + math.min(waiting, claim, room_of(typ, g.types))
        end
      end
    end
    return sum
  end
end
local function reserved_due(g, now, except)
  local sum, equal = 0, math.max(1, floor(g.permits / math.max(1, g.active)))
  for _, tenant in ipairs(call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, TENANTS)) do
    if tenant ~= except then sum = sum + math.min(equal, overdue(tenant, now)) end
  end
  return sum
end

-- half_for_due returns how many of a tenant's n permits are for its due jobs: half of them, the
-- others are for its waiting jobs. If n is odd, the last permit is for one side in one window and
-- for the other side in the next.
local function half_for_due(n)
  local odd = floor(US / 1000 / WIDTH) % 2
  return floor((n + odd) / 2)
end

-- rate_bound stores in the hash of a limit (key) that a permit was denied now. From the first
-- denial on (rs), waiting jobs count as waiting for the rate limit, until two windows after the
-- last one (rd). rate_since returns rs, or nil after that.
local function rate_bound(key, rd, now)
  if rd and now - rd <= 2 * WIDTH then
    call('HSET', key, 'rd', now)
  else
    call('HSET', key, 'rs', now, 'rd', now)
  end
end
local function rate_since(rs, rd, now)
  if rd > 0 and now - rd <= 2 * WIDTH then return rs end
  return nil
end
