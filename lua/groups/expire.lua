-- expire: deletes an ended group with all keys that have its name, or its result lines only. Its
-- owner key, dead letters and entries of the outbox stay. With the tenant's last group it deletes
-- the tenant too, unless that has settings, unfinished jobs or a pause.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -  the group's id
--   2  fence  n  fencing number of the partition's leader
--   3  scope  -  all, or results: delete the result lines, set results_expired in the group's hash
--                and keep the rest
-- Reply
--   {'OK'}      the data is deleted, by this or an earlier call
--   {'FENCED'}  another watcher is the leader
--   {'OPEN'}    the group has not ended, or sweep has not completed its cancellation, or a job still
--               runs that counts for its tenant's bound: after the group nobody would know the tenant
-- Twice: the second call finds nothing to delete.
-- Out of memory: goes through.
-- Cost: constant. Redis frees large values in the background.
local group, fence, scope = ARGV[1], ARGV[2], ARGV[3]
if call('HGET', B .. 'watch', 'fence') ~= fence then return { 'FENCED' } end
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'tenant', 'status', 'types', 'sweep', 'tags')
if g[1] and (g[4] or (g[2] ~= 'COMPLETED' and g[2] ~= 'FAILED' and g[2] ~= 'CANCELLED')) then return { 'OPEN' } end
if scope == 'results' then
  call('UNLINK', B .. 'results:' .. group)
  if g[1] then call('HSET', key, 'results_expired', 1) end
  return { 'OK' }
end
if g[1] and g[2] == 'CANCELLED' and call('HEXISTS', B .. 'tenant:' .. g[1], 'in_flight') == 1
  and entries_of(g[1], group) > 0 then
  return { 'OPEN' }
end
precheck('ZCARD', B .. 'groups', B .. 'ended', B .. 'failed', B .. 'open')
precheck('SCARD', B .. 'dirty', B .. 'active')
if g[1] then
  precheck('ZCARD', B .. 'groups:' .. g[1], B .. 'tenants')
  precheck('HLEN', B .. 'tenant:' .. g[1])
  precheck_tags(g[1], g[5])
end
for typ in string.gmatch(g[3] or '', '[^|]+') do
  call('UNLINK', B .. 'queue:' .. group .. ':' .. typ, B .. 'cancelled:' .. group .. ':' .. typ)
end
call('UNLINK', key, B .. 'states:' .. group, B .. 'payloads:' .. group, B .. 'results:' .. group,
  B .. 'aggregate:' .. group, B .. 'failures:' .. group, B .. 'errors:' .. group, B .. 'codes:' .. group,
  B .. 'keys:' .. group)
call('ZREM', B .. 'groups', group)
call('ZREM', B .. 'ended', group)
call('ZREM', B .. 'failed', group)
call('ZREM', B .. 'open', group)
call('SREM', B .. 'dirty', group)
if g[1] then
  call('ZREM', B .. 'groups:' .. g[1], group)
  untag(g[1], group, g[5])
  local unfinished = tonumber(call('HGET', B .. 'tenant:' .. g[1], 'unfinished') or 0)
  if call('ZCARD', B .. 'groups:' .. g[1]) == 0 and unfinished <= 0 then
    set_inactive(g[1])
    forget_tenant(g[1]) -- it keeps tenants that have settings or are paused
  end
end
return { 'OK' }
