-- repair_counter: what a type or a tenant counts is what the audit has counted; who has active jobs is in the active set, and no others.
-- KEYS  base
-- ARGV  what: type | tenant, its name, counter, what it was when the audit counted, what the audit counted
-- Reply {1} | {0} the counter has moved since: count again
-- Twice: it has moved. Goes through when memory is full. Cost: constant.
local tenant, name, counter, have, want = ARGV[1] == 'tenant', ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local key = tenant and B .. 'tenant:' .. name or B .. 'load:' .. name
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
