-- limit_state: reads how many permits of the global limit a partition has spent, and what is left of
-- the limits of a type. It changes only
-- the state of a limiter whose time is in the future because the clock was set back.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  limiter  -        fixed, sliding or token
--   2  width    ms       length of a window
--   3  typ      -        a type, '' = none
-- Reply
--   1  used     permits  fixed, spent in this window; sliding, spent in the last width; token, spent
--                        and not refilled yet. 0 without a limit
--   2  permits  permits  those of the type that the partition has in a window; -1 = it has no rate
--   3  spent    permits  those of the type that it has spent
--   4  next_at  µs       when the type's next permit comes; now, if one is left
--   5  places   jobs     how many entries the type may have in the partition, -1 = it has no bound
--   6  entries  jobs     how many it has
--   7  now      µs       Redis time
-- Twice: the second call answers again.
-- Out of memory: goes through, unless it has to change that state.
-- Cost: constant.
LIMITER, WIDTH = ARGV[1], tonumber(ARGV[2])
US = now_us()
local typ = ARGV[3]
local g = global(typ)
local T = type_limit(typ, typ ~= '' and g.spec) or { left = math.huge }
local rated = T.permits ~= nil
return { g.left and math.max(0, g.permits - g.left) or 0,
  rated and T.permits or -1, rated and math.max(0, T.permits - T.left) or 0,
  rated and T.left <= 0 and math.ceil(T.next_at) or US, T.places or -1,
  typ ~= '' and call('XLEN', B .. 'ready:' .. typ) or 0, US }
