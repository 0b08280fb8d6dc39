-- heartbeat: stores a process's report of itself.
--
-- KEYS
--   1  hash  the reports of the processes of a role
-- ARGV
--   1  process  -  the process's id
--   2  status   -  its report, as JSON
-- Reply
--   1  the process had no report
--   0  it had one, which this one replaces
-- Redis time (ms) is put in front of the report, because the clocks of hosts differ.
-- Twice: the later time remains.
-- Out of memory: goes through. A process that can't report itself would count as dead.
-- Cost: constant.
redis.call('HDEL', KEYS[1], '')
local t = redis.call('TIME')
local at = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))
return redis.call('HSET', KEYS[1], ARGV[1], at .. ' ' .. ARGV[2])
