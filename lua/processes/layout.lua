-- layout: changes the number of the layout of a part of the data, if it is what the caller expects.
--
-- KEYS
--   1  hash  part of the data → the number of its layout
-- ARGV
--   1  part  -  jobs, rooms or guards
--   2  from  -  the value that the caller has seen; "" = none
--   3  to    -  the new value
-- Reply
--   {value}  the value after the call: `to`, or what another process has written
-- Twice: the second call answers what there is.
-- Out of memory: goes through. A process could not start without the number.
-- Cost: constant.
redis.call('HDEL', KEYS[1], '')
local have = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if have == ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
  have = ARGV[3]
end
return { have }
