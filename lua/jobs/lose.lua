-- lose: ends jobs that the audit has found at no location.
-- State: waiting, non-ready, ready, in flight, done → failed, with code LOST; a failed job without
-- a record gets one
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -  the group's id
--   2  only   -  the type of the jobs, '' = not known: one of the group's types
--   then for each job, by ascending ordinal:
--   +1  ordinal  n  the job
--   +2  state    -  its state (letter and mark) when it was missed
-- Reply
--   {ordinal, …}  the jobs that the call has ended. A job that has moved in the meantime is not
--                 among them
-- A mark changes with each attempt, so an equal state says that no transition moved the job.
-- Waiting jobs are lost only as far as the group counts more of them than its queues hold.
-- If the type of a job is not known, its payload goes into the dead letter only: a retry must not
-- run it as another type.
-- If other jobs of the tenant are non-ready, the script can't know what a lost non-ready job
-- counted for. The audit's law of loads finds the counters that are wrong then.
-- Twice: the second call finds that the jobs have failed.
-- Out of memory: goes through.
-- Cost: some µs a job.
local group, only = ARGV[1], ARGV[2]
local key = B .. 'group:' .. group
local FIELDS = { W = 'waiting', N = 'non_ready', R = 'ready', I = 'in_flight', D = 'done', F = 'failed' }
local g = call('HMGET', key, 'tenant', 'status', 'round', 'types', 'type', 'lane', 'paused', 'waiting')
if not g[1] or g[2] == 'CANCELLED' then return {} end -- sweep counts the jobs of a cancelled group
local tenant, lane, now, factor = g[1], g[6], now_ms(), alpha()
local typ = only ~= '' and only or g[5]
local held = g[7] or call('ZSCORE', B .. 'scheduled', group)
local queued = 0
for t in string.gmatch(g[4] or '', '[^|]+') do queued = queued + call('LLEN', B .. 'queue:' .. group .. ':' .. t) end
local spare = tonumber(g[8] or 0) - queued -- waiting jobs that are counted but are not in a queue
local ords, missed = {}, {}
for i = 3, #ARGV, 2 do ords[#ords + 1], missed[#missed + 1] = tonumber(ARGV[i]), ARGV[i + 1] end
local states, span = load_states(group, ords)
local new, n, ended = {}, { W = 0, N = 0, R = 0, I = 0, D = 0, F = 0 }, {}
for i = 1, #ords do
  local letter = string.sub(missed[i], 1, 1)
  if FIELDS[letter] and states[i] == missed[i] and (letter ~= 'W' or n.W < spare) and
    (letter ~= 'F' or call('HEXISTS', B .. 'failures:' .. group, ords[i]) == 0) then
    new[i], n[letter], ended[#ended + 1] = 'F' .. string.sub(missed[i], 2), n[letter] + 1, ords[i]
  end
end
local lost = #ended
if lost == 0 then return ended end
precheck('HLEN', B .. 'load:' .. typ)
precheck('ZCARD', B .. 'non-ready', B .. 'non-ready:' .. tenant)
precheck_enqueue(typ, lane, tenant)
precheck_activate(tenant)
precheck_rerank(g[4], factor)
precheck_fail_job(group)
precheck('HLEN', B .. 'errors:' .. group)
precheck_mark_dirty()
allow_oom()

local congested = 0
for i = 1, #ords do
  if new[i] then
    local attempt = string.byte(new[i], 2) - 33
    local head = group .. '|' .. typ .. '|' .. attempt .. '|0|0|0|0|0|0|0||'
      .. string.format('%.0f|%.0f||', ords[i], now)
    if string.sub(missed[i], 1, 1) == 'N' and attempt > 0 then
      local errors = call('HGET', B .. 'errors:' .. group, ords[i])
      if not string.find(errors or '', '^[^\n]*"reason":"G"') then congested = congested + 1 end
    end
    local place = string.gsub(FIELDS[string.sub(missed[i], 1, 1)], '_', '-')
    local message = 'the job was ' .. place .. ' and vanished from Redis'
    if place == 'failed' then message = 'the job has failed and the record of it vanished from Redis' end
    local type_known = only ~= '' or not string.find(g[4] or '', '|', 1, true)
    if not type_known then
      message = message .. '; its type can not be told: submit it again in a new group'
    elseif call('HEXISTS', B .. 'payloads:' .. group, ords[i]) == 1 then
      message = message .. '; its payload is kept: retry the group to run it'
    else
      message = message .. ', its payload too: submit it again in a new group'
    end
    fail_job(group, tenant, tonumber(g[3]), parse(head), head, 'LOST', message, now)
    -- The record has no payload: without the stored one, a retry can't run the job as another type.
    if not type_known then call('HDEL', B .. 'payloads:' .. group, ords[i]) end
  end
end
store_states(group, ords, new, span)
add(key, 'waiting', -n.W, 'non_ready', -n.N, 'ready', -n.R, 'in_flight', -n.I, 'done', -n.D)
add(key, 'failed', lost - n.F)
add(B .. 'tenant:' .. tenant, 'unfinished', n.D + n.F - lost)
free_places(tenant, n.R + n.I)
if only ~= '' then add(B .. 'load:' .. typ, 'waiting', -n.W, 'non_ready', -n.N, 'failed', lost - n.F) end
if n.W > 0 and not held then
  activate(tenant, -n.W)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  if queued == 0 then
    withdraw(typ, lane, tenant, group)
  elseif call('ZSCORE', of, group) then
    call('ZINCRBY', of, -n.W * AGE_MS, group)
  end
end
if n.N > 0 then
  local counts = call('HMGET', B .. 'tenant:' .. tenant, 'congested', 'marker')
  if call('ZCARD', B .. 'non-ready:' .. tenant) > 0 then
    add(B .. 'tenant:' .. tenant, 'congested', -math.min(congested, math.max(0, tonumber(counts[1] or 0))))
  else -- no job is non-ready: the counters of non-ready jobs are wrong
    call('HDEL', B .. 'tenant:' .. tenant, 'congested', 'marker')
    if counts[2] then activate(tenant, -1) end
    call('ZREM', B .. 'non-ready', tenant)
  end
end
rerank(group, g[4], factor)
check_end(group)
return ended
