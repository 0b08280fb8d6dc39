-- pauses: whether a tenant or a type is paused. Whether a group is paused is in the group's hash. A
-- tenant's pause is also the field paused of its hash, which admit and promote read; pause writes
-- both.
-- NEEDS  base
-- OFFERS
--   any_paused()            whether any tenant or type is paused
--   is_paused(scope, id)    whether the tenant (scope = t) or the type (scope = y) is paused

-- The hash pauses is nearly always empty. So a script calls any_paused once, and is_paused only if
-- that returns true.
local function any_paused() return call('HLEN', B .. 'pauses') > 0 end
local function is_paused(scope, id) return call('HEXISTS', B .. 'pauses', scope .. ':' .. id) == 1 end
