-- enlist: stores a new operation, unless too many have not ended.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  id      -  the operation's id
--   2  tenant  -  that of the API key, '' = none
--   3  most    n  of all operations that have not ended
--   4  own     n  likewise, of those with the same tenant, if it has one
--   then for each further field of its hash:
--   +1  name   -  the field
--   +2  value  -  its value
-- Reply
--   {'OK'}       the operation is stored, by this or an earlier call
--   {'MANY', n}  n operations have not ended
--   {'OWN', n}   n operations of the tenant have not ended
-- Twice: the second call changes nothing.
-- Out of memory: refused.
-- Cost: a read for each operation that has not ended, if the key has a tenant.
local id, tenant = ARGV[1], ARGV[2]
local key = operation(id)
if call('EXISTS', key) == 1 and call('ZSCORE', B .. 'operations', id) then return { 'OK' } end
local open = call('ZRANGE', B .. 'operations:open', 0, -1)
if #open >= tonumber(ARGV[3]) then return { 'MANY', #open } end
local own = 0
for i = 1, tenant == '' and 0 or #open do
  if guarded(call, 'HGET', operation(open[i]), 'tenant') == tenant then own = own + 1 end
end
if own >= tonumber(ARGV[4]) then return { 'OWN', own } end
precheck('ZCARD', B .. 'operations', B .. 'operations:open')
local now = now_ms()
call('HSET', key, 'tenant', tenant, 'state', 'RUNNING', 'created', now, 'seq', 0, unpack(ARGV, 5))
call('ZADD', B .. 'operations:open', now, id)
call('ZADD', B .. 'operations', now, id)
return { 'OK' }
