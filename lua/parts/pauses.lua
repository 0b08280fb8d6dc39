-- pauses: whether a tenant or a type is paused. A group says so in its own hash.
-- NEEDS  base
-- OFFERS
--   any_paused()           whether any tenant or type is
--   is_paused(what, id)    whether the tenant (what = t) or the type (y) is

-- What is paused: a group says so itself, tenants and types are in one hash, which is empty nearly always.
local function any_paused() return call('HLEN', B .. 'pauses') > 0 end
local function is_paused(what, id) return call('HEXISTS', B .. 'pauses', what .. ':' .. id) == 1 end
