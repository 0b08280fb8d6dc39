-- cancel_job: ends one job that has not started, as cancelled.
-- State: waiting, non-ready, ready → cancelled
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group    -  the group's id
--   2  ordinal  n  the job
--   3  typ      -  its type, '' = not known
--   4  place    -  where the caller has found it: the blob in its queue, its moving blob, or the id
--                  of its entry in the ready stream; '' = nowhere
--   5  from     -  where to begin to look for it in its queue: 1 = at the head, -1 = at the tail
-- Reply
--   {'OK', steps}  the job is cancelled, by this or an earlier call. steps has the job if this call
--                  has ended it and it is sampled (see parts/blob.lua)
--   {'NOGROUP'}    there is no such group
--   {'NOJOB'}      the group has no such job
--   {'GROUP'}      the group is cancelled, and the job with it
--   {'STARTED'}    the job is in flight, or a worker has it and is about to start it
--   {'ENDED'}      the job is done or has failed
--   {'MOVED'}      the job is not where the caller has found it
-- The job leaves its place, with its payload and its errors. A permit that it has spent stays spent.
-- Twice: the second call answers OK and changes nothing.
-- Out of memory: goes through.
-- Cost: a search of the half of the queue in which the job is, or of its tenant's non-ready jobs.
local group, ordinal, typ, place, from = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'tenant', 'status', 'lane', 'paused')
if not g[1] then return { 'NOGROUP' } end
local state = call('GETRANGE', B .. 'states:' .. group, ordinal * 2, ordinal * 2 + 1)
local letter, tenant = string.sub(state, 1, 1), g[1]
if letter == '' then return { 'NOJOB' } end
if letter == 'C' then return { 'OK', steps } end
if g[2] == 'CANCELLED' then return { 'GROUP' } end
if letter == 'I' then return { 'STARTED' } end
if not string.find(letter, '[WNR]') then return { 'ENDED' } end
if typ == '' or place == '' then return { 'MOVED' } end

local queue, stream = B .. 'queue:' .. group .. ':' .. typ, B .. 'ready:' .. typ
local attempt, reason = 0, ''
local trace
if letter == 'W' then
  local number, its_trace = string.match(place, '^(%d+)|%d+|([^|]*)|')
  if tonumber(number or nil) ~= ordinal then return { 'MOVED' } end
  trace = its_trace
else
  local blob = place
  if letter == 'R' then
    if not string.find(place, '^%d+%-%d+$') then return { 'MOVED' } end
    local found = call('XRANGE', stream, place, place)
    blob = found[1] and entry_blob(found[1][2]) or ''
  end
  local j = parse(blob)
  if not j or j.group ~= group or j.typ ~= typ or j.ordinal ~= ordinal or letter .. mark(j.attempt) ~= state then
    return { 'MOVED' }
  end
  trace, attempt, reason = j.trace, j.attempt, j.reason
end
local taken = letter == 'R' and redis.pcall('XPENDING', stream, 'workers', place, place, 1)
if taken and taken[1] then return { 'STARTED' } end -- without a consumer group, it is an error: nobody has read it
local held = g[4] or call('ZSCORE', B .. 'scheduled', group)
local suspended = letter == 'N' and not call('ZSCORE', B .. 'non-ready:' .. tenant, place)
if suspended and not call('ZSCORE', B .. 'suspended:' .. tenant, place) then return { 'MOVED' } end
precheck('LLEN', queue)
precheck('XLEN', stream)
precheck('HLEN', B .. 'load:' .. typ, B .. 'payloads:' .. group, B .. 'errors:' .. group)
precheck('ZCARD', B .. 'non-ready', B .. 'non-ready:' .. tenant, B .. 'suspended:' .. tenant)
precheck('SCARD', B .. 'suspended', B .. 'resuming')
precheck_enqueue(typ, g[3], tenant)
precheck_activate(tenant)
precheck_mark_dirty()
allow_oom()

if letter == 'W' then
  if call('LREM', queue, from, place) == 0 then return { 'MOVED' } end
  call('HINCRBY', B .. 'load:' .. typ, 'waiting', -1)
  if not held then
    activate(tenant, -1)
    local of = B .. 'fair:' .. typ .. ':' .. g[3] .. ':' .. tenant
    if call('LLEN', queue) == 0 then
      withdraw(typ, g[3], tenant, group)
    elseif call('ZSCORE', of, group) then
      call('ZINCRBY', of, -AGE_MS, group)
    end
  end
elseif letter == 'R' then
  call('XACK', stream, 'workers', place)
  call('XDEL', stream, place)
  free_places(tenant, 1)
  refill(typ)
else
  call('ZREM', B .. (suspended and 'suspended:' or 'non-ready:') .. tenant, place)
  call('HINCRBY', B .. 'load:' .. typ, 'non_ready', -1)
  if not suspended then
    if is_congested(reason) then call('HINCRBY', B .. 'tenant:' .. tenant, 'congested', -1) end
    if reason == 'R' then
      activate(tenant, -1)
      call('HDEL', B .. 'tenant:' .. tenant, 'marker')
    end
    reindex(tenant)
  elseif call('ZCARD', B .. 'suspended:' .. tenant) == 0 then
    call('SREM', B .. 'suspended', tenant)
    call('SREM', B .. 'resuming', tenant)
  end
end
call('SETRANGE', B .. 'states:' .. group, ordinal * 2, 'C' .. string.sub(state, 2))
call('HDEL', B .. 'payloads:' .. group, ordinal)
call('HDEL', B .. 'errors:' .. group, ordinal)
local FIELDS = { W = 'waiting', N = 'non_ready', R = 'ready' }
add(key, FIELDS[letter], -1, 'cancelled', 1)
add(B .. 'tenant:' .. tenant, 'unfinished', -1)
if trace ~= '' then note_step('cancel', group, ordinal, tenant, trace, attempt, '') end
check_end(group)
return { 'OK', steps }
