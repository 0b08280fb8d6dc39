-- erase_job: replaces what is kept of a failed job by a record without its payload, key and error text.
-- The job can't run again: it would fail with PAYLOAD_LOST.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group    -  the group's id
--   2  ordinal  n  the job
--   3  key      -  its key, '' = it is not in the index of the group
--   4  record   -  its record in failures:GROUP, '' = it has none
--   5  erased   -  the new record
--   6  letter   -  its entry in the dead letters, '' = it has none
-- Reply
--   {'OK'}     it is erased
--   {'MOVED'}  its record is another one now, or its key is that of another job
-- Twice: MOVED, or OK without a record.
-- Out of memory: goes through.
-- Cost: constant.
local group, ordinal, key, record, letter = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[6]
local failures, index = B .. 'failures:' .. group, B .. 'keys:' .. group
if (call('HGET', failures, ordinal) or '') ~= record then return { 'MOVED' } end
if key ~= '' and call('HGET', index, key) ~= ordinal then return { 'MOVED' } end
precheck('HLEN', B .. 'payloads:' .. group, B .. 'errors:' .. group)
precheck('XLEN', B .. 'dead-letters')
allow_oom()
call('HDEL', B .. 'payloads:' .. group, ordinal)
call('HDEL', B .. 'errors:' .. group, ordinal)
if letter ~= '' then call('XDEL', B .. 'dead-letters', letter) end
if record ~= '' then call('HSET', failures, ordinal, ARGV[5]) end
if key ~= '' then call('HDEL', index, key) end
return { 'OK' }
