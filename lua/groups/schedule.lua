-- schedule: puts groups whose run_at has come into the fair queue. A paused group leaves the
-- schedule too, but enters the fair queue when it is resumed. A cancelled one only leaves it.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  most  groups  most groups to take from the schedule
-- Reply
--   {n, wait}  n groups left the schedule; wait is the time until the next one, ms (-1 = none)
-- Twice: a group that left the schedule is not in it any more.
-- Out of memory: goes through.
-- Cost: some commands for each group and type.
local most = tonumber(ARGV[1])
local now = now_ms()
local due = call('ZRANGEBYSCORE', B .. 'scheduled', '-inf', now, 'LIMIT', 0, most)
if #due > 0 then
  local factor = alpha()
  local ready = {} -- {group, tenant, lane, waiting jobs by type and in all} of groups that may start
  for _, group in ipairs(due) do
    local g = call('HMGET', B .. 'group:' .. group, 'tenant', 'lane', 'types', 'status', 'paused')
    if g[1] and g[4] ~= 'CANCELLED' and not g[5] then -- a paused group enters when it is resumed
      precheck_activate(g[1])
      ready[#ready + 1] = { group, g[1], g[2], waiting_by_type(group, g[3], g[2], g[1]) }
    end
  end
  precheck('LLEN', B .. 'wake:fetcher')
  allow_oom()
  for _, r in ipairs(ready) do
    enqueue_all(r[4], r[3], r[2], r[1], now, factor)
    activate(r[2], r[5])
  end
  call('ZREM', B .. 'scheduled', unpack(due))
  wake('fetcher')
end
local first = call('ZRANGE', B .. 'scheduled', 0, 0, 'WITHSCORES')
return { #due, #first > 0 and math.max(0, tonumber(first[2]) - now) or -1 }
