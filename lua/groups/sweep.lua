-- sweep: moves a batch of the jobs of a cancelled group to cancelled. In the end it removes the
-- group's waiting, non-ready and suspended jobs, deletes its payloads and its hash errors:GROUP,
-- and moves it from the open groups to the ended ones. Entries of a ready stream are left to start
-- and reclaim.
-- State: waiting, non-ready, ready, in flight → cancelled
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -     the group's id
--   2  most   jobs  most jobs to look at; of the non-ready and suspended ones, about that many
-- Reply
--   {'MORE', n, steps}  the state of n jobs was set to cancelled; call again. steps has the sampled
--                       jobs that were removed from their locations (see parts/blob.lua)
--   {'DONE', 0, steps}  nothing is left to move or to remove, or the group is not cancelled
-- Cursors in the group's hash say where the next call continues.
-- Twice: the second call moves the next jobs.
-- Out of memory: goes through.
-- Cost: about 0.3 µs a job.
local group, most = ARGV[1], tonumber(ARGV[2])
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'sweep', 'accepted', 'tenant', 'sweep_non_ready', 'types')
if g[1] ~= 'CANCELLED' or not g[2] then return { 'DONE', 0, steps } end
local at, accepted, tenant = tonumber(g[2]), tonumber(g[3] or 0), g[4]
local NAMES = { W = 'waiting', N = 'non_ready', R = 'ready', I = 'in_flight' }
precheck_activate(tenant)
precheck('SCARD', B .. 'suspended', B .. 'resuming')
precheck('ZCARD', B .. 'open', B .. 'ended', B .. 'non-ready', B .. 'non-ready:' .. tenant, B .. 'suspended:' .. tenant)
for typ in string.gmatch(g[6] or '', '[^|]+') do
  precheck('HLEN', B .. 'load:' .. typ)
  precheck('LLEN', B .. 'cancelled:' .. group .. ':' .. typ)
end
if at < accepted then
  local span = call('GETRANGE', B .. 'states:' .. group, at * 2, (at + most) * 2 - 1)
  local n, counts = 0, { W = 0, N = 0, R = 0, I = 0 }
  local swept = string.gsub(span, '(.)(.)', function(letter, m)
    if not NAMES[letter] then return nil end
    counts[letter], n = counts[letter] + 1, n + 1
    return 'C' .. m
  end)
  allow_oom()
  if n > 0 then call('SETRANGE', B .. 'states:' .. group, at * 2, swept) end
  add(key, 'waiting', -counts.W, 'non_ready', -counts.N, 'ready', -counts.R, 'in_flight', -counts.I)
  add(key, 'cancelled', n)
  add(B .. 'tenant:' .. tenant, 'unfinished', -n)
  call('HSET', key, 'sweep', math.min(accepted, at + most))
  return { 'MORE', n, steps }
end
-- When all states are written, remove the group's waiting jobs in batches. Their queues are the
-- lists cancelled:GROUP:TYPE, as cancel has renamed them.
for typ in string.gmatch(g[6] or '', '[^|]+') do
  local queue = B .. 'cancelled:' .. group .. ':' .. typ
  local blobs = call('LRANGE', queue, 0, most - 1)
  if #blobs > 0 then
    allow_oom()
    for _, blob in ipairs(blobs) do
      local ordinal, trace = string.match(blob, '^(%d+)|%d+|([^|]+)|')
      if trace then note_step('cancel', group, ordinal, tenant, trace, 0, '') end
    end
    call('LTRIM', queue, #blobs, -1)
    return { 'MORE', 0, steps }
  end
end
-- At the end, remove the group's non-ready and suspended jobs, so that no job that is scheduled for
-- next year stays in memory. The non-ready ones are first; a cursor that begins with s belongs to
-- the suspended ones.
local cursor = g[5] or '0'
local suspended = string.sub(cursor, 1, 1) == 's'
local jobs = B .. (suspended and 'suspended:' or 'non-ready:') .. tenant
local page = call('ZSCAN', jobs, suspended and string.sub(cursor, 2) or cursor, 'COUNT', most)
allow_oom()
local removed = 0
for i = 1, #page[2], 2 do
  local j = parse(page[2][i])
  if j and j.group == group and call('ZREM', jobs, page[2][i]) == 1 then
    call('HINCRBY', B .. 'load:' .. j.typ, 'non_ready', -1)
    note_step('cancel', group, j.ordinal, tenant, j.trace, j.attempt, '')
    if not suspended then
      if is_congested(j.reason) then call('HINCRBY', B .. 'tenant:' .. tenant, 'congested', -1) end
      if j.reason == 'R' then
        activate(tenant, -1)
        call('HDEL', B .. 'tenant:' .. tenant, 'marker')
      end
      removed = removed + 1
    end
  end
end
if removed > 0 then reindex(tenant) end
if page[1] ~= '0' or not suspended then
  local next_page = page[1]
  if suspended or page[1] == '0' then next_page = 's' .. page[1] end
  call('HSET', key, 'sweep_non_ready', next_page)
  return { 'MORE', 0, steps }
end
if call('ZCARD', B .. 'suspended:' .. tenant) == 0 then
  call('SREM', B .. 'suspended', tenant)
  call('SREM', B .. 'resuming', tenant)
end
check_last(tenant)
call('UNLINK', B .. 'payloads:' .. group, B .. 'errors:' .. group)
call('HDEL', key, 'sweep', 'sweep_non_ready')
call('ZREM', B .. 'open', group)
call('ZADD', B .. 'ended', now_ms(), group)
return { 'DONE', 0, steps }
