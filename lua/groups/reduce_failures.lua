-- reduce_failures: stores the partial aggregate of a group's failed jobs when all jobs have ended,
-- and makes the group dirty, so that advance ends it.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group   -     the group's id
--   2  round   n     the round in which the caller has read the failures
--   3  failed  jobs  the group's number of failed jobs then
--   4  state   -     the partial aggregate
-- Reply
--   {'OK'}
-- It answers OK and does nothing if the group is neither AGGREGATING nor CANCELLED, or has another round or number of
-- failed jobs.
-- The failures of a round are final then, except that lose may add some. reopen deletes this
-- partial aggregate, so that each round reduces the jobs that are failed at its end.
-- Twice: the second call stores the same again, or does nothing because the group has ended.
-- Out of memory: goes through.
-- Cost: constant.
local group, round, failed, state = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'round', 'failed')
if g[1] ~= 'AGGREGATING' and g[1] ~= 'CANCELLED' or g[2] ~= round or g[3] ~= failed then return { 'OK' } end
precheck('HLEN', B .. 'aggregate:' .. group)
precheck_mark_dirty()
allow_oom()
call('HSET', B .. 'aggregate:' .. group, 'partial:failed', state)
call('HSET', key, 'failures_reduced', failed)
mark_dirty(group)
return { 'OK' }
