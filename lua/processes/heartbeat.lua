-- heartbeat: a process reports that it is alive, and its status.
-- KEYS  hash
-- ARGV  process, status as JSON
-- Reply 1
-- Redis's time (ms) stands in front of the status, since the clocks of hosts differ.
-- Twice: the later time holds. Goes through when memory is full: a process that can't report itself would count as gone.
redis.call('HDEL', KEYS[1], '')
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000)) .. ' ' .. ARGV[2])
return 1
