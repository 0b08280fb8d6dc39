-- endings: attempts that end with an error, jobs that fail, and groups whose last job has ended.
-- NEEDS  base, blob, signals
-- OFFERS
--   with_error(old, err)        a record of errors:GROUP with an error added
--   precheck_fail_job(group)    reads the keys that fail_job writes
--   fail_job(group, tenant, round, j, blob, code, message, now)
--                               records a failed job, and notes it in steps
--   check_end(group)            marks a sealed group dirty if all its jobs have ended

-- with_error returns the record that a job has in errors:GROUP after err, a table: an error or a
-- deferral. old is the job's present record, false for none. A record has the newest KEPT_ERRORS of
-- both as lines of JSON, the newest first. A deferral is kept only until the next error or
-- deferral, because a job may be deferred any number of times.
local KEPT_ERRORS = 3
local function with_error(old, err)
  local record, lines, at = cjson.encode(err), 1, 1
  while old and lines < KEPT_ERRORS and at <= #old do
    local stop = string.find(old, '\n', at, true) or #old + 1 -- a pattern would cost 10 ns a character
    local line = string.sub(old, at, stop - 1)
    if not string.find(line, '"reason":"G"', 1, true) then record, lines = record .. '\n' .. line, lines + 1 end
    at = stop + 1
  end
  return record
end

-- fail_job records a job that has failed: its error with the job itself in failures:GROUP, so that
-- a later round can run it; one more job with this code in codes:GROUP; and a dead letter, which
-- requeue deletes. The errors of its earlier attempts stay in errors:GROUP. fail_job changes j. The
-- caller writes state and counts, and removes the job from its location.
local function precheck_fail_job(group)
  precheck('XLEN', B .. 'dead-letters')
  precheck('HLEN', B .. 'payloads:' .. group, B .. 'failures:' .. group, B .. 'codes:' .. group)
end
local function fail_job(group, tenant, round, j, blob, code, message, now)
  local payload, key = payload_and_key(string.sub(blob, j.payload_at))
  if payload == '' then payload = call('HGET', B .. 'payloads:' .. group, tostring(j.ordinal)) or '' end
  local letter = { 'job', group .. '.' .. j.ordinal, 'tenant', tenant, 'group', group,
    'ordinal', j.ordinal, 'type', j.typ, 'code', code, 'error', message, 'attempts', j.attempt, 'at', now,
    'payload', payload }
  if key ~= '' then letter[#letter + 1], letter[#letter + 2] = 'key', key end
  local entry = call('XADD', B .. 'dead-letters', '*', unpack(letter))
  local err = cjson.encode({
    ordinal = j.ordinal, code = code, error = message, attempts = j.attempt, at = now, round = round, letter = entry,
  })
  note_step('fail', group, j.ordinal, tenant, j.trace, j.attempt, code)
  j.retries, j.throttles, j.losses, j.wf, j.wr, j.wc, j.since, j.reason = 0, 0, 0, 0, 0, 0, 0, ''
  call('HSET', B .. 'failures:' .. group, j.ordinal, err .. '\n' .. compose(j, blob))
  call('HINCRBY', B .. 'codes:' .. group, code, 1)
end

-- check_end marks the group dirty if it is sealed and all its jobs have ended. The caller has
-- written the counts before.
local function check_end(group)
  local g = call('HMGET', B .. 'group:' .. group, 'sealed', 'accepted', 'done', 'failed', 'cancelled')
  local ended = tonumber(g[3] or 0) + tonumber(g[4] or 0) + tonumber(g[5] or 0)
  if g[1] and tonumber(g[2] or 0) <= ended then mark_dirty(group) end
end
