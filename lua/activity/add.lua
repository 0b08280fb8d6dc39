-- add: stores an entry in the activity log, also when Redis's memory is full.
--
-- KEYS
--   1  stream  the activity log
-- ARGV
--   1  oldest  ms  entries that are older are deleted, 0: none
--   2  most    n   about how many entries stay at most; Redis may keep some more
--   then, for each field of the entry:
--   +1  name   -  its name
--   +2  value  -  its value
-- Reply
--   the id of the entry
-- Twice: stores the entry twice.
-- Out of memory: goes through, because it begins with XTRIM; otherwise nobody could cancel groups.
-- Cost: the number of entries that it deletes.
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', unpack(ARGV, 3))
