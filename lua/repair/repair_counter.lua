-- repair_counter: sets a counter of a type or tenant, or the bytes of a queue of callbacks, to what the audit
-- has counted. With the counter active it also adds the tenant to the set of active tenants or removes it; a paused
-- tenant is never in it.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  scope    -  type, tenant or callbacks
--   2  name     -  the type or tenant; callbacks: ignored
--   3  counter  -  field of its hash
--   4  have     n  the counter's value while the audit counted
--   5  want     n  what the audit counted
-- Reply
--   {1}  the counter is corrected
--   {0}  the counter has changed since: nothing was written, count again
-- Twice: the second call finds another value, or sets the same.
-- Out of memory: goes through.
-- Cost: constant.
local tenant, name, counter, have, want = ARGV[1] == 'tenant', ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local key = tenant and B .. 'tenant:' .. name or B .. 'load:' .. name
if ARGV[1] == 'callbacks' then key = B .. 'callbacks:bytes' end
if tonumber(call('HGET', key, counter) or 0) ~= have then return { 0 } end
if tenant then precheck_activate(name) end
allow_oom()
if want == 0 then
  call('HDEL', key, counter)
elseif want ~= have then
  call('HSET', key, counter, want)
end
if tenant and counter == 'active' then
  if want > 0 and not call('HGET', key, 'paused') then set_active(name) else set_inactive(name) end
end
return { 1 }
