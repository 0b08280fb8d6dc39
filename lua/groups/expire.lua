-- expire: deletes an ended group with all keys that have its name, or its result lines only. Its
-- owner key, dead letters and entries of the outbox stay, and those of ready streams unless the group is
-- deleted now. With the tenant's last group it deletes the tenant too, unless that has settings,
-- unfinished jobs or a pause.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -  the group's id
--   2  fence  n  fencing number of the partition's leader; '' = somebody asks for it, scope now
--   3  scope  -  all; now = all, and its entries in ready streams, so that what a worker reports of its
--                jobs is stale; or results: delete the result lines, set results_expired in the group's
--                hash and keep the rest
-- Reply
--   {'OK'}      the data is deleted, by this or an earlier call
--   {'FENCED'}  another watcher is the leader
--   {'OPEN'}    the group has not ended, or sweep has not completed its cancellation, or a job still
--               runs that counts for its tenant's bound: after the group nobody would know the tenant
-- Twice: the second call finds nothing to delete.
-- Out of memory: goes through.
-- Cost: constant; scope now reads the ready streams of its types, which are short. Redis frees large
-- values in the background.
local group, fence, scope = ARGV[1], ARGV[2], ARGV[3]
if scope ~= 'now' and call('HGET', B .. 'watch', 'fence') ~= fence then return { 'FENCED' } end
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'tenant', 'status', 'types', 'sweep', 'tags')
if g[1] and (g[4] or (g[2] ~= 'COMPLETED' and g[2] ~= 'FAILED' and g[2] ~= 'CANCELLED')) then return { 'OPEN' } end
if scope == 'results' then
  call('UNLINK', B .. 'results:' .. group)
  if g[1] then call('HSET', key, 'results_expired', 1) end
  return { 'OK' }
end
if scope ~= 'now' and g[1] and g[2] == 'CANCELLED' and call('HEXISTS', B .. 'tenant:' .. g[1], 'in_flight') == 1
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
for typ in string.gmatch(scope == 'now' and g[3] or '', '[^|]+') do
  precheck('HLEN', B .. 'load:' .. typ)
  local stream, ids = B .. 'ready:' .. typ, {}
  for _, entry in ipairs(call('XRANGE', stream, '-', '+')) do
    local fields = entry[2]
    if string.match(fields[1] == 'j' and fields[2] or fields[1], '^[^|]+') == group then ids[#ids + 1] = entry[1] end
  end
  allow_oom()
  for i = 1, #ids do
    redis.pcall('XACK', stream, 'workers', ids[i]) -- without a consumer group, nobody has read it
    call('XDEL', stream, ids[i])
  end
  if #ids > 0 then
    free_places(g[1], #ids)
    refill(typ)
  end
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
