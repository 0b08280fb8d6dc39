-- limit_state: how many permits of the global limit a partition has spent. It changes only the
-- state of a limiter that lies too far ahead because the clock was set back.
-- KEYS  base
-- ARGV  limiter, window ms, permits a window of all partitions (0 = no limit),
--       this partition's first part, tag of the division
-- Reply {spent permits}: fixed in this window, sliding in the last WIDTH, token not yet refilled
-- Twice: the same. Goes through when memory is full. Cost: constant.
LIMITER, WIDTH = ARGV[1], tonumber(ARGV[2])
US = now_us()
local g = global(tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5])
return { g.left and math.max(0, g.permits - g.left) or 0 }
