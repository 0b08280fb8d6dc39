-- cancel: ends a group at once and seals it. None of its jobs starts any more. It leaves the fair
-- queue and the schedule, and its lists queue:GROUP:TYPE are renamed to cancelled:GROUP:TYPE. sweep
-- empties them later, and moves all jobs that have not ended to cancelled. A pause or a requeueing
-- of the group ends.
-- State: any state that is not final → CANCELLED
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -  the group's id
-- Reply
--   {'OK'}             the group is cancelled, by this or an earlier call
--   {'NOGROUP'}        there is no such group
--   {'ENDED', status}  the group is COMPLETED or FAILED
-- Twice: the second call answers OK and changes nothing.
-- Out of memory: goes through.
-- Cost: some commands for each type of the group.
local group = ARGV[1]
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'tenant', 'types', 'lane', 'round', 'paused')
local last = g[1] and call('HGET', key, 'at:' .. string.lower(g[1]))
if not g[1] then return { 'NOGROUP' } end
if g[1] == 'CANCELLED' then return { 'OK' } end
if g[1] == 'COMPLETED' or g[1] == 'FAILED' then return { 'ENDED', g[1] } end
-- Redis's clock may go back: no state begins before the last one.
local now, tenant = math.max(now_ms(), tonumber(last or 0)), g[2]
local held = g[6] or call('ZSCORE', B .. 'scheduled', group)
local waiting = waiting_by_type(group, g[3], g[4], tenant)
for typ in pairs(waiting) do
  precheck('HLEN', B .. 'load:' .. typ)
  precheck('LLEN', B .. 'cancelled:' .. group .. ':' .. typ)
end
precheck_activate(tenant)
precheck_announce()
precheck_mark_dirty()
allow_oom()
call('HSET', key, 'status', 'CANCELLED', 'at:cancelled', now, 'sealed', 1, 'sweep', 0)
call('HDEL', key, 'requeue', 'paused')
announce(group, g[5], { 'CANCELLED', now }, call('HGETALL', key))
for typ, n in pairs(waiting) do
  if n > 0 then
    call('HINCRBY', B .. 'load:' .. typ, 'waiting', -n)
    if not held then activate(tenant, -n) end
    call('RENAME', B .. 'queue:' .. group .. ':' .. typ, B .. 'cancelled:' .. group .. ':' .. typ)
  end
  withdraw(typ, g[4], tenant, group)
end
call('ZREM', B .. 'scheduled', group)
mark_dirty(group)
return { 'OK' }
