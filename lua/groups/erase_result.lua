-- erase_result: replaces a chunk of result lines.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -  the group's id
--   2  index  n  the chunk
--   3  sha1   -  of the chunk as it was read
--   4  lines  -  the new chunk
-- Reply
--   {'OK'}     it is replaced
--   {'MOVED'}  the chunk is another one now
-- Twice: MOVED.
-- Out of memory: goes through.
-- Cost: in proportion to the chunk.
local results = B .. 'results:' .. ARGV[1]
local chunk = call('LINDEX', results, ARGV[2])
if not chunk or redis.sha1hex(chunk) ~= ARGV[3] then return { 'MOVED' } end
allow_oom()
call('LSET', results, ARGV[2], ARGV[4])
return { 'OK' }
