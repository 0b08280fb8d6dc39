-- operations: the hash of an operation, and its end.
-- NEEDS  base
-- OFFERS
--   operation(id)                the key of its hash
--   leads(fence)                 whether the caller is the leader of the partition by its fencing number
--   precheck_end_operation()     reads the key that end_operation writes
--   end_operation(id, state)     ends an operation

local function operation(id) return B .. 'operation:' .. id end

local function leads(fence) return call('HGET', B .. 'watch', 'fence') == fence end

local function precheck_end_operation() precheck('ZCARD', B .. 'operations:open') end
local function end_operation(id, state)
  call('HSET', operation(id), 'state', state, 'ended', now_ms())
  call('ZREM', B .. 'operations:open', id)
end
