-- reclaim: takes back the jobs of dead workers.
-- State: ready, in flight → non-ready, due at once; ready → non-ready, of a type without workers; after too many losses: in flight → failed
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  typ    -        the type
--   2  lease  ms       a job whose entry was idle for this long is taken back
--   3  most   entries  most entries to take from the stream
--   4  cap    n        most losses of a job; with one more it fails
--   5  idle   0|1      1 = no worker has served the type for a lease. Undelivered entries of jobs that
--                      hold a place of a bound are then taken back, too
-- Reply
--   {taken, failed, {entry, …}, stale, steps}
--     taken   jobs that are non-ready now; they need another permit
--     failed  jobs that have failed
--     entry   a pending entry that does not exist any more: another program deleted it
--     stale   entries that held no job (they are quarantined), another attempt, or a job of a
--             cancelled or deleted group
--     steps   the sampled ones among these jobs (see parts/blob.lua)
-- The script checks the idle times itself, in the step that moves the jobs. Only a job that was in
-- flight counts a loss. One loss makes it a suspect, which a worker process runs alone: so each
-- further loss is certainly caused by this job. For deleted entries, the field suspicious of the
-- hash watch makes the watcher look for their jobs.
-- Twice: the second call does not find the entries.
-- Out of memory: goes through.
-- Cost: some µs an entry.
local typ, lease, most, cap = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local stream = B .. 'ready:' .. typ
precheck('XLEN', stream)
local pending = redis.pcall('XPENDING', stream, 'workers', 'IDLE', lease, '-', '+', most)
if pending.err then pending = {} end
-- holds_place says whether an entry's job holds a place of a bound, of its type or its tenant.
local type_bound = string.find(call('HGET', B .. 'rate', 'type:' .. typ) or '', '%d$') ~= nil
local function holds_place(fields)
  if type_bound then return true end
  local j = parse(entry_blob(fields))
  local tenant = j and call('HGET', B .. 'group:' .. j.group, 'tenant')
  return tenant and call('HEXISTS', B .. 'tenant:' .. tenant, 'in_flight') == 1
end
if ARGV[5] == '1' and #pending < most then
  local held = redis.pcall('XPENDING', stream, 'workers', '-', '+', most)
  local seen = {}
  for _, p in ipairs(held.err and {} or held) do seen[p[1]] = true end
  local from = #held < most and '-'
  while from and #pending < most do
    local page = call('XRANGE', stream, from, '+', 'COUNT', most)
    for _, entry in ipairs(page) do
      if #pending < most and not seen[entry[1]] and holds_place(entry[2]) then pending[#pending + 1] = entry end
    end
    from = #page == most and '(' .. page[most][1]
  end
end
if #pending == 0 then return { 0, 0, {}, 0, {} } end
local now, factor = now_ms(), alpha()
local entries, taken, failed, missing, stale = {}, 0, 0, {}, 0
precheck('LLEN', B .. 'quarantine')
precheck('HLEN', B .. 'watch', B .. 'load:' .. typ)
precheck('LLEN', B .. 'wake:fetcher')
precheck_mark_dirty()
allow_oom()
for _, p in ipairs(pending) do
  local id = p[1]
  local found = call('XRANGE', stream, id, id)
  entries[#entries + 1] = id
  if #found == 0 then
    missing[#missing + 1] = id
  else
    local blob = entry_blob(found[1][2])
    local j = parse(blob)
    if not j then
      quarantine('ready:' .. typ, blob)
      stale = stale + 1
    else
      local group, key, errors = j.group, B .. 'group:' .. j.group, B .. 'errors:' .. j.group
      local g = call('HMGET', key, 'tenant', 'status', 'round', 'types')
      local state = call('GETRANGE', B .. 'states:' .. group, j.ordinal * 2, j.ordinal * 2 + 1)
      local letter, m = string.sub(state, 1, 1), string.sub(state, 2)
      -- A job that was started again with the same entry has one attempt more than its blob says.
      if m == mark(j.attempt + 1) and letter == 'I' then j.attempt = j.attempt + 1 end
      if g[1] and g[2] ~= 'CANCELLED' and (letter == 'R' or letter == 'I') and m == mark(j.attempt) then
        local field, tenant = letter == 'R' and 'ready' or 'in_flight', g[1]
        precheck('HLEN', B .. 'tenant:' .. tenant)
        precheck_non_ready(tenant, typ)
        precheck_fail_job(group)
        precheck('HLEN', errors)
        precheck_rerank(g[4], factor)
        if letter == 'I' then j.losses = j.losses + 1 end
        if j.losses > cap then
          local message = 'every worker that ran this job was lost, ' .. cap
            .. ' of them while it ran alone: see BULKACTION_MAX_DELIVERIES'
          fail_job(group, tenant, tonumber(g[3]), j, blob, 'WORKER_LOST', message, now)
          call('SETRANGE', B .. 'states:' .. group, j.ordinal * 2, 'F' .. m)
          add(key, field, -1, 'failed', 1)
          call('HINCRBY', B .. 'tenant:' .. tenant, 'unfinished', -1)
          rerank(group, g[4], factor)
          check_end(group)
          failed = failed + 1
        else
          if letter == 'I' then
            call('HSET', errors, j.ordinal, with_error(call('HGET', errors, j.ordinal), {
              ordinal = j.ordinal, code = 'WORKER_LOST', error = 'the worker was lost while it ran the job',
              attempts = j.attempt, at = now, ['until'] = now, reason = 'E',
            }))
          end
          note_step('reclaim', group, j.ordinal, tenant, j.trace, j.attempt, '')
          j.since, j.reason = now, 'E'
          add_non_ready(tenant, typ, { now, compose(j, blob) })
          call('HINCRBY', B .. 'tenant:' .. tenant, 'congested', 1)
          call('SETRANGE', B .. 'states:' .. group, j.ordinal * 2, 'N' .. m)
          add(key, field, -1, 'non_ready', 1)
          taken = taken + 1
        end
        free_places(tenant, 1)
      else
        if g[1] then free_places(g[1], 1) end
        if g[2] == 'CANCELLED' and string.find(letter, '[CIR]') and m == mark(j.attempt) then
          note_step('cancel', group, j.ordinal, g[1], j.trace, j.attempt, '')
        end
        stale = stale + 1
      end
    end
  end
end
add(B .. 'load:' .. typ, 'failed', failed)
if #missing > 0 then
  call('HINCRBY', B .. 'watch', 'suspicious', #missing)
  wake('watcher')
end
call('XACK', stream, 'workers', unpack(entries))
call('XDEL', stream, unpack(entries))
refill(typ)
return { taken, failed, missing, stale, steps }
