-- lead: makes a process the leader of a partition, or the quota rebalancer, until its lease ends.
-- The fencing number grows with each change of leader, and when a leader's lease had ended before
-- it was extended.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  process  -   the process's id
--   2  lease    ms  length of the lease; 0 = give it up
--   3  scope    -   watch (lead the partition) or rebalance (the quotas)
--   4  above    n   the fencing number is to be higher than this one: others are known by it. Redis may
--                   have lost the key
-- Reply
--   {fence, left}  the fencing number, 0 while another process leads or after a lease of 0; ms
--                  until the lease ends, the caller's or that of the other process
-- Twice: the leader keeps its number while its lease lasts, and the lease is extended.
-- Out of memory: goes through.
-- Cost: constant.
local process, lease = ARGV[1], tonumber(ARGV[2])
local key, now = B .. ARGV[3], now_ms()
local w = call('HMGET', key, 'owner', 'until', 'fence')
local ends = tonumber(w[2] or 0)
if w[1] and w[1] ~= process and ends > now then return { 0, ends - now } end
allow_oom()
if lease == 0 then
  if w[1] == process then call('HSET', key, 'until', 0) end
  return { 0, 0 }
end
local fence, above = tonumber(w[3] or 0), tonumber(ARGV[4] or 0)
if w[1] ~= process or ends <= now or fence <= above then fence = math.max(fence, above) + 1 end
call('HSET', key, 'owner', process, 'until', now + lease, 'fence', fence)
return { fence, lease }
