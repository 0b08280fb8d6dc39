-- set_limits: changes limits, or says that they are in effect, if nobody else has changed them since the
-- caller read them.
--
-- KEYS
--   1  hash  the limits that were set
-- ARGV
--   1  rev   n    the revision that the caller has seen; 0 = none
--   2  step  0|1  1 = the revision grows: limits change
--   then for each setting:
--   +1  field  -  its name
--   +2  value  -  its value, '' = the setting ends
-- Reply
--   {1}  the settings are stored
--   {0}  the revision is another one: nothing was written
-- Twice: the second call finds another revision, or stores the same.
-- Out of memory: goes through: a limit may have to be lowered then.
-- Cost: constant.
redis.call('HDEL', KEYS[1], '')
local rev = tonumber(redis.call('HGET', KEYS[1], 'rev') or 0)
if rev ~= tonumber(ARGV[1]) then return { 0 } end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
redis.call('HSET', KEYS[1], 'rev', string.format('%.0f', rev + ARGV[2]))
return { 1 }
