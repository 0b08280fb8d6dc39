-- reopen: opens the next round of an ended group. Calls of requeue then move its failed jobs.
-- State: COMPLETED | FAILED → CREATED
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists (README.md, rule 7)
-- ARGV
--   1  group    -  the group's id
--   2  request  -  id of the request, '' = none
-- Reply
--   {'OK', round}      the number of the round that is open
--   {'NOGROUP'}        there is no such group
--   {'STATE', status}  the group has not ended, or it was cancelled
--   {'NONE'}           no job of the group has failed
-- Twice, with a request id: the second call answers OK with the same round. So does any call while
-- requeue still moves the round's jobs.
-- Out of memory: refused.
-- Cost: constant.
local group, request = ARGV[1], ARGV[2]
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'round', 'failed', 'requeue', 'reopened')
if not g[1] then return { 'NOGROUP' } end
if g[4] or (request ~= '' and g[5] == request) then return { 'OK', tonumber(g[2]) } end
if g[1] ~= 'COMPLETED' and g[1] ~= 'FAILED' then return { 'STATE', g[1] } end
if tonumber(g[3] or 0) == 0 then return { 'NONE' } end
precheck('XLEN', B .. 'outbox')
precheck('HLEN', B .. 'aggregate:' .. group)
precheck('ZCARD', B .. 'open', B .. 'ended')
precheck_mark_dirty()
local now, round = now_ms(), tonumber(g[2]) + 1
call('HSET', key, 'status', 'CREATED', 'round', round, 'requeue', 0, 'reopened', request, 'at:created', now)
call('HDEL', key, 'at:dispatched', 'at:running', 'at:aggregating', 'at:completed', 'at:failed', 'started',
  'failures_reduced')
call('HDEL', B .. 'aggregate:' .. group, 'partial:failed')
announce(group, 'CREATED', round, now, call('HGETALL', key))
call('ZREM', B .. 'ended', group)
call('ZADD', B .. 'open', now, group)
mark_dirty(group)
return { 'OK', round }
