-- permits: the permits that one run of a script spends and refuses.
-- NEEDS  base, limiters
-- OFFERS
--   spend_permits(g, t, n)    spends n permits of a tenant
--   spend_type(T, n)          spends n permits of a type
--   permits                   {tenant, n, …}: the permits spent; without a limit, the jobs
--   deny(tenant, reason)      notes that a tenant was refused a permit
--   denials                   {tenant, reason, …}

local permits, denials, position = {}, {}, {}

-- spend_permits spends n permits of a tenant's limit and of the partition's. t has the tenant's
-- name, its key, and limit: what left returned as the state for spend; nil = the tenant has no
-- limit. g is what global returned (see shares); without a global limit only the tenant's permits
-- are spent.
local function spend_permits(g, t, n)
  if n == 0 then return end
  local at = position[t.name] or #permits + 1
  position[t.name], permits[at], permits[at + 1] = at, t.name, (permits[at + 1] or 0) + n
  if t.limit then spend[LIMITER](t.key, t.limit, n) end
  if not g.state then return end
  g.left = g.left - n
  spend[LIMITER](B .. 'rate', g.state, n)
end

-- spend_type spends n permits of a type with a rate. T is what type_limit returned (see shares), or
-- nil.
local function spend_type(T, n)
  if not T then return end
  T.left = T.left - n
  if T.state and n > 0 then spend[LIMITER](T.key, T.state, n) end
end

-- deny adds a tenant that was refused a permit to the list denials. The reason is global (all
-- permits of the partition are spent), per_group (the tenant's own are, or what is left of them is
-- kept for its other jobs; the metric's label has this name), type (those of the type are), or
-- in_flight (as many jobs of the tenant or the type are ready or in flight as may be).
local function deny(tenant, reason)
  denials[#denials + 1] = tenant
  denials[#denials + 1] = reason
end
