-- heartbeats: reads the reports of all processes of a role, and Redis time.
--
-- KEYS
--   1  hash  the reports of the processes of a role
-- ARGV
--   none
-- Reply
--   {process, report, …, now}  the report of each process, as heartbeat has stored it: Redis time
--                              then (ms), a space and the JSON; the last element is Redis time, ms
-- Twice: the second call answers again.
-- Out of memory: goes through.
-- Cost: the number of processes.
local all = redis.call('HGETALL', KEYS[1])
local t = redis.call('TIME')
all[#all + 1] = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))
return all
