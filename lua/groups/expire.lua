-- expire: an ended group and all that it holds are forgotten.
-- KEYS  base
-- ARGV  group, fencing number, 'all' or 'results' (keep the group, drop result lines and payloads)
-- Reply {'OK'} | {'FENCED'} | {'OPEN'} it has not ended
-- Twice: nothing is left to do. Goes through when memory is full. Cost: constant (large values are freed in the background).
local group, fence, what = ARGV[1], ARGV[2], ARGV[3]
if call('HGET', B .. 'watch', 'fence') ~= fence then return { 'FENCED' } end
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'tenant', 'status', 'types', 'sweep')
if g[1] and (g[4] or (g[2] ~= 'COMPLETED' and g[2] ~= 'FAILED' and g[2] ~= 'CANCELLED')) then return { 'OPEN' } end
if what == 'results' then
  call('UNLINK', B .. 'results:' .. group)
  if g[1] then call('HSET', key, 'results_expired', 1) end
  return { 'OK' }
end
precheck('ZCARD', B .. 'groups', B .. 'ended', B .. 'open')
precheck('SCARD', B .. 'dirty', B .. 'active')
if g[1] then
  precheck('ZCARD', B .. 'groups:' .. g[1], B .. 'tenants')
  precheck('HLEN', B .. 'tenant:' .. g[1])
end
for typ in string.gmatch(g[3] or '', '[^|]+') do call('UNLINK', B .. 'queue:' .. group .. ':' .. typ) end
call('UNLINK', key, B .. 'states:' .. group, B .. 'payloads:' .. group, B .. 'results:' .. group, B .. 'aggregate:' .. group,
  B .. 'failures:' .. group, B .. 'errors:' .. group, B .. 'codes:' .. group)
call('ZREM', B .. 'groups', group)
call('ZREM', B .. 'ended', group)
call('ZREM', B .. 'open', group)
call('SREM', B .. 'dirty', group)
if g[1] then
  call('ZREM', B .. 'groups:' .. g[1], group)
  if call('ZCARD', B .. 'groups:' .. g[1]) == 0 and tonumber(call('HGET', B .. 'tenant:' .. g[1], 'unfinished') or 0) <= 0 then
    set_inactive(g[1])
    forget_tenant(g[1]) -- unless an operator has set something: that outlives its groups
  end
end
return { 'OK' }
