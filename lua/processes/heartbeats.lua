-- heartbeats: reads the status of all processes, and Redis's time.
-- KEYS  hash
-- ARGV  none
-- Reply process and status in turn, and Redis's time (ms) behind them
-- Twice: it answers again. Goes through when memory is full.
local all = redis.call('HGETALL', KEYS[1])
local t = redis.call('TIME')
all[#all + 1] = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000))
return all
