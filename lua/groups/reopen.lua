-- reopen: the next round of an ended group begins; requeue then moves its failed jobs.  COMPLETED, FAILED → CREATED
-- KEYS  base
-- ARGV  group, request id ('' = none)
-- Reply {'OK', round} | {'NOGROUP'} | {'STATE', status} it has not ended, or was cancelled | {'NONE'} no job has failed
-- Twice, with a request id: the second call answers OK with the same round, as does any while the new round's jobs are being moved.
-- Refused when memory is full.
local group, request = ARGV[1], ARGV[2]
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'round', 'failed', 'requeue', 'reopened')
if not g[1] then return { 'NOGROUP' } end
if g[4] or (request ~= '' and g[5] == request) then return { 'OK', tonumber(g[2]) } end
if g[1] ~= 'COMPLETED' and g[1] ~= 'FAILED' then return { 'STATE', g[1] } end
if tonumber(g[3] or 0) == 0 then return { 'NONE' } end
precheck('XLEN', B .. 'outbox')
precheck('ZCARD', B .. 'open', B .. 'ended')
precheck_mark_dirty()
local now, round = now_ms(), tonumber(g[2]) + 1
call('HSET', key, 'status', 'CREATED', 'round', round, 'requeue', 0, 'reopened', request, 'at:created', now)
call('HDEL', key, 'at:dispatched', 'at:running', 'at:aggregating', 'at:completed', 'at:failed', 'started')
call('XADD', B .. 'outbox', '*', 'group', group, 'status', 'CREATED', 'round', round, 'at', now, 'snapshot', cjson.encode(call('HGETALL', key)))
call('ZREM', B .. 'ended', group)
call('ZADD', B .. 'open', now, group)
mark_dirty(group)
return { 'OK', round }
