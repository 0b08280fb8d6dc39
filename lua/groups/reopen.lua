-- reopen: opens the next round of an ended group. Calls of requeue then move its failed jobs.
-- State: COMPLETED | FAILED → CREATED
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group    -  the group's id
--   2  request  -  id of the request, '' = none
--   3  chosen   -  which failed jobs to move, as JSON: {"codes": [code, …], "jobs": [ordinal, …]},
--                  those with one of the codes and those with one of the ordinals; '' = all
--   4  adds     -  a prefix of request: the chosen jobs are added to the present round, if a request
--                  with this prefix has opened it, and it has not ended; '' = no
-- Reply
--   {'OK', round}      the group's present round, which this or an earlier call has opened
--   {'NOGROUP'}        there is no such group
--   {'STATE', status}  the group has not ended, or it was cancelled
--   {'NONE'}           no job of the group has failed
--   {'NOTCHOSEN'}      no failed job is among the chosen ones
--   {'MOVING'}         requeue still moves the jobs of this round, and the earlier call that opened
--                      it chose others
-- Twice, with a request id: the second call answers OK with the same round, unless another
-- reopening came between. So does any call while requeue still moves the round's jobs, if it has
-- chosen the same.
-- Out of memory: refused.
-- Cost: constant, and some µs for each chosen code and ordinal.
local group, request, chosen = ARGV[1], ARGV[2], ARGV[3]
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'round', 'failed', 'requeue', 'reopened', 'retry')
if not g[1] then return { 'NOGROUP' } end
if request ~= '' and g[5] == request then return { 'OK', tonumber(g[2]) } end
local adds = chosen ~= '' and (ARGV[4] or '') ~= '' and string.sub(g[5] or '', 1, #ARGV[4]) == ARGV[4]
if adds and not g[4] and (g[1] == 'CREATED' or g[1] == 'DISPATCHED' or g[1] == 'RUNNING') then
  precheck_mark_dirty()
  call('HSET', key, 'requeue', 0, 'reopened', request, 'retry', chosen)
  mark_dirty(group)
  return { 'OK', tonumber(g[2]) }
end
if g[4] and (g[6] or '') ~= chosen then return { 'MOVING' } end
if g[4] then return { 'OK', tonumber(g[2]) } end
if g[1] ~= 'COMPLETED' and g[1] ~= 'FAILED' then return { 'STATE', g[1] } end
if tonumber(g[3] or 0) == 0 then return { 'NONE' } end
-- any_chosen says whether one of the chosen jobs has failed.
local function any_chosen()
  local all = cjson.decode(chosen)
  for _, code in ipairs(all.codes or {}) do
    if tonumber(call('HGET', B .. 'codes:' .. group, code) or 0) > 0 then return true end
  end
  for _, ordinal in ipairs(all.jobs or {}) do
    if call('GETRANGE', B .. 'states:' .. group, ordinal * 2, ordinal * 2) == 'F' then return true end
  end
  return false
end
if chosen ~= '' and not any_chosen() then return { 'NOTCHOSEN' } end
precheck_announce()
precheck('HLEN', B .. 'aggregate:' .. group)
precheck('ZCARD', B .. 'open', B .. 'ended', B .. 'failed')
precheck_mark_dirty()
local now, round = now_ms(), tonumber(g[2]) + 1
call('HSET', key, 'status', 'CREATED', 'round', round, 'requeue', 0, 'reopened', request, 'at:created', now)
if chosen ~= '' then call('HSET', key, 'retry', chosen) else call('HDEL', key, 'retry') end
call('HDEL', key, 'at:dispatched', 'at:running', 'at:aggregating', 'at:completed', 'at:failed', 'started',
  'failures_reduced')
call('HDEL', B .. 'aggregate:' .. group, 'partial:failed')
announce(group, round, { 'CREATED', now }, call('HGETALL', key))
call('ZREM', B .. 'ended', group)
call('ZREM', B .. 'failed', group)
call('ZADD', B .. 'open', now, group)
mark_dirty(group)
return { 'OK', round }
