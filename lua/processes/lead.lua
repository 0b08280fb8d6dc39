-- lead: one process at a time leads a partition, or rebalances the quotas, under a lease and a number that grows with each change of leader.
-- KEYS  base
-- ARGV  process, lease ms (0 = give it up), what: watch | rebalance
-- Reply {fencing number, or 0 while another leads; ms until the lease ends}
-- Twice: the same leader keeps its number. Goes through when memory is full. Cost: constant.
local me, lease = ARGV[1], tonumber(ARGV[2])
local key, now = B .. ARGV[3], now_ms()
local w = call('HMGET', key, 'owner', 'until', 'fence')
local ends = tonumber(w[2] or 0)
if w[1] and w[1] ~= me and ends > now then return { 0, ends - now } end
allow_oom()
if lease == 0 then
  if w[1] == me then call('HSET', key, 'until', 0) end
  return { 0, 0 }
end
local fence = tonumber(w[3] or 0)
if w[1] ~= me or ends <= now then fence = fence + 1 end
call('HSET', key, 'owner', me, 'until', now + lease, 'fence', fence)
return { fence, lease }
