-- advance: moves a group through its states as far as its ledger allows.  CREATED → DISPATCHED → RUNNING → AGGREGATING → COMPLETED | FAILED
-- KEYS  base
-- ARGV  group, fencing number
-- Reply {'OK', transitions} | {'FENCED'} another watcher leads
-- Each transition is timestamped and put into the outbox with the group as it was. Twice: nothing is left to do.
-- Goes through when memory is full. Cost: constant.
local group, fence = ARGV[1], ARGV[2]
if call('HGET', B .. 'watch', 'fence') ~= fence then return { 'FENCED' } end
local key = B .. 'group:' .. group
local moved = 0
see('ZCARD', B .. 'open', B .. 'ended')
see_attend()
pass_oom()
while true do
  local g = call('HMGET', key, 'status', 'sealed', 'requeue', 'started', 'accepted', 'done', 'failed', 'cancelled', 'reduced', 'failure_threshold', 'round', 'tenant')
  local status = g[1]
  if not status then break end
  see_activate(g[12])
  local accepted, done, failed = tonumber(g[5] or 0), tonumber(g[6] or 0), tonumber(g[7] or 0)
  local all_ended = done + failed + tonumber(g[8] or 0) >= accepted
  local to
  if status == 'CREATED' and g[2] and not g[3] then
    to = 'DISPATCHED'
  elseif status == 'DISPATCHED' and (g[4] or all_ended) then
    to = 'RUNNING'
  elseif status == 'RUNNING' and all_ended then
    to = 'AGGREGATING'
  elseif status == 'AGGREGATING' and tonumber(g[9] or 0) >= done then
    to = (failed > 0 and failed / accepted >= tonumber(g[10] or 1)) and 'FAILED' or 'COMPLETED'
  end
  if not to then break end
  local now = now_ms()
  call('HSET', key, 'status', to, 'at:' .. string.lower(to), now)
  call('XADD', B .. 'outbox', '*', 'group', group, 'status', to, 'round', g[11], 'at', now, 'snapshot', cjson.encode(call('HGETALL', key)))
  moved = moved + 1
  if to == 'COMPLETED' or to == 'FAILED' then
    call('ZREM', B .. 'open', group)
    call('HDEL', key, 'paused')
    call('ZADD', B .. 'ended', now, group)
    check_last(g[12])
  end
end
call('SREM', B .. 'attention', group)
return { 'OK', moved }
