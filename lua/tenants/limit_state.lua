-- limit_state: reads how many permits of the global limit a partition has spent. It changes only
-- the state of a limiter whose time is in the future because the clock was set back.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  limiter  -        fixed, sliding or token
--   2  width    ms       length of a window
--   3  total    permits  permits in a window, of all partitions together; 0 = no limit
--   4  part     permits  this partition's quota until it is rebalanced
--   5  tag      -        name of the limit and of the number of partitions, '' = one partition
-- Reply
--   {n}  permits: fixed, spent in this window; sliding, spent in the last width; token, spent and
--        not refilled yet. 0 without a limit
-- Twice: the second call answers again.
-- Out of memory: goes through, unless it has to change that state.
-- Cost: constant.
LIMITER, WIDTH = ARGV[1], tonumber(ARGV[2])
US = now_us()
local g = global(tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5])
return { g.left and math.max(0, g.permits - g.left) or 0 }
