-- advance: moves a group through its states as far as its counts allow.
-- State: CREATED → DISPATCHED → RUNNING → AGGREGATING → COMPLETED | FAILED
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -  the group's id
--   2  fence  n  fencing number of the partition's leader
-- Reply
--   {'OK', n, failures, round}  the group made n transitions. If failures is above 0, the group
--                               ends only after reduce_failures has stored the aggregate of its
--                               failed jobs: failures is their number, round the group's round.
--                               Of a cancelled group that is settled, they are those before its end
--   {'FENCED'}                  another watcher is the leader
-- Each transition is timestamped, never before the last one: Redis's clock may go back. It goes to the outbox with the group's hash as it is then. The
-- group is not dirty any more, unless it was cancelled and has such failures. When it ends, it is not paused any more either; if its tenant has
-- neither unfinished nor non-ready jobs then, the tenant becomes inactive, and its counters are
-- reset (check_last).
-- Twice: the second call finds no transition to make.
-- Out of memory: goes through.
-- Cost: constant.
local group, fence = ARGV[1], ARGV[2]
if call('HGET', B .. 'watch', 'fence') ~= fence then return { 'FENCED' } end
local key = B .. 'group:' .. group
local moved, failures = 0, 0
precheck('ZCARD', B .. 'open', B .. 'ended', B .. 'failed')
precheck_mark_dirty()
allow_oom()
local g, flat = {}, call('HGETALL', key)
for i = 1, #flat, 2 do g[flat[i]] = flat[i + 1] end
local function n(field) return tonumber(g[field] or 0) end
-- set writes a field in the two local copies of the group's hash: the table g, and the list flat,
-- {field, value, …}, which goes to the outbox. It does not write to Redis.
local function set(field, value)
  if not g[field] then flat[#flat + 1], flat[#flat + 2] = field, value end
  for i = 1, #flat, 2 do
    if flat[i] == field then flat[i + 1] = value end
  end
  g[field] = value
end
if g.status then precheck_activate(g.tenant) end
while g.status do
  local status, to = g.status, nil
  local all_ended = n('done') + n('failed') + n('cancelled') >= n('accepted')
  if status == 'CREATED' and g.sealed and not g.requeue then
    to = 'DISPATCHED'
  elseif status == 'DISPATCHED' and (g.started or all_ended) then
    to = 'RUNNING'
  elseif status == 'RUNNING' and all_ended then
    to = 'AGGREGATING'
  elseif status == 'AGGREGATING' and n('reduced') >= n('done') and g.reduce_failures
    and n('failures_reduced') ~= n('failed') then
    failures = n('failed')
  elseif status == 'CANCELLED' and not g.sweep and g.reduce_failures and n('failures_reduced') ~= n('failed') then
    failures = n('failed')
  elseif status == 'AGGREGATING' and n('reduced') >= n('done') then
    local too_many = n('failed') > 0 and n('failed') / n('accepted') >= tonumber(g.failure_threshold or 1)
    to = too_many and 'FAILED' or 'COMPLETED'
  end
  if not to then break end
  local at, last = 'at:' .. string.lower(to), n('at:' .. string.lower(status))
  local now = string.format('%.0f', math.max(now_ms(), last))
  call('HSET', key, 'status', to, at, now)
  set('status', to)
  set(at, now)
  announce(group, to, g.round, now, flat)
  moved = moved + 1
  if to == 'COMPLETED' or to == 'FAILED' then
    call('ZREM', B .. 'open', group)
    call('HDEL', key, 'paused')
    call('ZADD', B .. 'ended', now, group)
    if to == 'FAILED' then call('ZADD', B .. 'failed', now, group) end
    check_last(g.tenant)
  end
end
-- A cancelled group is not open: as long as its failures are not reduced, only this set has it.
if g.status ~= 'CANCELLED' or failures == 0 then call('SREM', B .. 'dirty', group) end
return { 'OK', moved, failures, n('round') }
