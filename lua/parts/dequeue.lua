-- dequeue: takes the next jobs of a type out of the fair queue. The variables below SETS get their
-- values from the script that uses it.
-- NEEDS  base, blob, fair_queue, non_ready, states
-- SETS
--   typ         the type
--   stream      its ready stream
--   fair        its key fair:TYPE
--   load_key    its key load:TYPE
--   seed        eight random hex digits, for span ids
--   now         Redis time, ms
--   by_group    whether the groups of a lane are ordered by priority
-- OFFERS
--   next_group(lane, tenant)                   the tenant's next group, and how many jobs wait
--   take(group, k, place)                      takes jobs out of a group's queue
--   to_ready(group, tenant, bound)             a place function: the ready stream
--   to_non_ready(group, tenant, bound, due)    a place function: the non-ready jobs
--   count_taken(group, lane, tenant, field, went, gone, n)
--                                              writes the counters after a take, but those of
--                                              load:TYPE:
--   taken                                      how many jobs have left their queues

local typ, stream, fair, load_key, seed, now, by_group
local next_group, take, to_ready, to_non_ready, count_taken
local taken = 0

do
  local match, find, sub, rep = string.match, string.find, string.sub, string.rep
  local byte, format = string.byte, string.format
  local WAITING = byte('W')

  -- next_group returns the group of a tenant that is served next, and the number of its waiting
  -- jobs of the type; nil if no group is left. It removes groups without such jobs from the queue.
  function next_group(lane, tenant)
    local of = fair .. ':' .. lane .. ':' .. tenant
    while true do
      local first = call('ZRANGE', of, 0, 0)
      if #first == 0 then return nil end
      local n = call('LLEN', B .. 'queue:' .. first[1] .. ':' .. typ)
      if n > 0 then return first[1], n end
      call('ZREM', of, first[1])
    end
  end

  -- A segment is a part of a list of queued blobs: consecutive ordinals, one accepted time, no
  -- trace. A traced job is a segment of its own. The fields of a segment:
  --   at              position of its first blob
  --   n               number of blobs
  --   lo              ordinal of the first job
  --   accepted, trace of all jobs
  --   attempt         of all jobs; the take functions set it

  -- alike counts how many blobs from s on are one segment. Making a string of the head of each blob
  -- would cost more than everything else here. So alike compares the last digit of the ordinal
  -- apart from the digits in front of it, which change for each tenth job only.
  local function alike(blobs, s)
    local tail, first = '|' .. s.accepted .. '||', match(blobs[s.at], '^%d+')
    local digits, digit, front, n = #first, s.lo % 10, sub(first, 1, -2), 1
    for i = s.at + 1, #blobs do
      digit = digit + 1
      if digit > 9 then digit, front = 0, format('%d', (s.lo + n) / 10) end
      local blob = blobs[i]
      if byte(blob, digits) ~= 48 + digit or find(blob, tail, digits + 1, true) ~= digits + 1
        or find(blob, front, 1, true) ~= 1 then
        break
      end
      n = n + 1
    end
    return n
  end

  -- segments divides queued blobs into a list of segments and a list of blobs that can't be read.
  local function segments(blobs)
    local all, unreadable, i, n = {}, {}, 1, #blobs
    while i <= n do
      local ordinal, accepted, trace = match(blobs[i], '^(%d+)|(%d+)|([^|]*)|')
      if ordinal and #ordinal <= 9 then
        local s = { at = i, n = 1, lo = tonumber(ordinal), accepted = accepted, trace = trace }
        if trace == '' then s.n = alike(blobs, s) end
        all[#all + 1], i = s, i + s.n
      else
        unreadable[#unreadable + 1], i = blobs[i], i + 1
      end
    end
    return all, unreadable
  end

  -- take_whole moves segments of waiting jobs with one read and one write of their states. It
  -- returns how many jobs it moved; or nil, without having moved any, if a job is not waiting any
  -- more, attempts differ in a segment, or the ordinals do not ascend or are far apart.
  local function take_whole(group, all, place, blobs)
    local key, lo, last = B .. 'states:' .. group, all[1].lo, all[#all]
    local hi = last.lo + last.n - 1
    for i = 2, #all do
      if all[i].lo < all[i - 1].lo + all[i - 1].n then return nil end
    end
    if hi - lo >= SPAN or hi < lo then return nil end
    local span, went = call('GETRANGE', key, lo * 2, hi * 2 + 1), 0
    for _, s in ipairs(all) do
      local at = (s.lo - lo) * 2
      local state = sub(span, at + 1, at + 2)
      if byte(state) ~= WAITING then return nil end
      if s.n > 1 and sub(span, at + 1, at + 2 * s.n) ~= rep(state, s.n) then return nil end
      s.attempt = byte(state, 2) - 33
    end
    local out, from = {}, 1
    for _, s in ipairs(all) do
      local at = (s.lo - lo) * 2
      if at + 1 > from then out[#out + 1] = sub(span, from, at) end
      out[#out + 1] = rep(place(blobs, s), s.n)
      from, went = at + 2 * s.n + 1, went + s.n
    end
    call('SETRANGE', key, lo * 2, table.concat(out))
    return went
  end

  -- take_each moves the jobs of segments that are still waiting, one job at a time. It returns how
  -- many it moved.
  local function take_each(group, all, place, blobs)
    local ords, ones, new, went = {}, {}, {}, 0
    for _, s in ipairs(all) do
      for i = 0, s.n - 1 do
        ords[#ords + 1] = s.lo + i
        ones[#ones + 1] = { at = s.at + i, n = 1, lo = s.lo + i, accepted = s.accepted, trace = s.trace }
      end
    end
    local states, span = load_states(group, ords)
    for i, s in ipairs(ones) do
      local letter, m = byte(states[i], 1, 2)
      if letter == WAITING then
        s.attempt, went = m - 33, went + 1
        new[i] = place(blobs, s)
      end
    end
    store_states(group, ords, new, span)
    return went
  end

  -- take moves up to k jobs from the head of a group's queue, and writes their states. place adds
  -- the jobs of a segment to their new location and returns their new state. take quarantines
  -- elements that can't be read, and drops jobs that do not wait any more. It returns how many jobs
  -- it moved, and how many elements it removed from the queue.
  local counts -- of the group, before the take
  function take(group, k, place)
    local queue = B .. 'queue:' .. group .. ':' .. typ
    local popped = call('LRANGE', queue, 0, k - 1)
    local all, unreadable = segments(popped)
    local went = 0
    counts = call('HMGET', B .. 'group:' .. group, 'waiting', 'ready', 'non_ready')
    if #all > 0 then went = take_whole(group, all, place, popped) or take_each(group, all, place, popped) end
    for _, blob in ipairs(unreadable) do quarantine('queue:' .. group .. ':' .. typ, blob) end
    call('LTRIM', queue, #popped, -1)
    return went, #popped
  end

  -- waited returns how long (ms) a job has waited for the fair queue, until bound, and for the rate
  -- limit, from bound on. bound is since when permits are denied; nil = they are not.
  local function waited(accepted, bound)
    local all = math.max(0, now - accepted)
    local rate = bound and math.max(0, math.min(all, now - bound)) or 0
    return all - rate, rate
  end

  -- trace_job starts the next span of a sampled job. It returns the job's blob with the new span as
  -- its parent; the blob of another job unchanged.
  local function trace_job(group, tenant, blob, s, fairness, rate)
    if s.trace == '' then return blob end
    local front = format('%d|', s.lo) .. s.accepted .. '|'
    local trace = new_span(seed, group, s.lo, tenant, s.trace, now, fairness, rate)
    return front .. trace .. sub(blob, #front + #s.trace + 1)
  end

  -- to_ready and to_non_ready return place functions for take. bound is since when permits are
  -- denied, or nil.
  function to_ready(group, tenant, bound)
    return function(blobs, s)
      local fairness, rate = waited(tonumber(s.accepted), bound)
      local waits = format('%.0f|%.0f|0|%.0f||', fairness, rate, now)
      local head = group .. '|' .. typ .. '|' .. (s.attempt + 1) .. '|0|0|0|' .. waits
      if s.trace == '' then
        for i = s.at, s.at + s.n - 1 do call('XADD', stream, '*', head, blobs[i]) end
      else
        call('XADD', stream, '*', head, trace_job(group, tenant, blobs[s.at], s, fairness, rate))
      end
      return 'R' .. mark(s.attempt + 1)
    end
  end

  function to_non_ready(group, tenant, bound, due)
    return function(blobs, s)
      local fairness, rate = waited(tonumber(s.accepted), bound)
      local waits = format('%.0f|%.0f|0|%.0f|R|', fairness, rate, now)
      local head = group .. '|' .. typ .. '|' .. s.attempt .. '|0|0|0|' .. waits
      local due_jobs = {}
      for i = s.at, s.at + s.n - 1 do
        due_jobs[#due_jobs + 1] = due
        due_jobs[#due_jobs + 1] = head .. trace_job(group, tenant, blobs[i], s, fairness, rate)
      end
      add_non_ready(tenant, typ, due_jobs)
      return 'N' .. mark(s.attempt)
    end
  end

  -- count_taken writes the group's counts and the fair queue after a take: went jobs
  -- moved to the state that field names, gone elements left the queue, which had n. It removes a
  -- group without waiting jobs from the fair queue, but not the tenant from its lane. It returns
  -- true if no group of the tenant is left in the lane.
  function count_taken(group, lane, tenant, field, went, gone, n)
    local of = fair .. ':' .. lane .. ':' .. tenant
    if went > 0 then
      call('HSET', B .. 'group:' .. group, 'waiting', tonumber(counts[1] or 0) - went,
        field, tonumber(counts[field == 'ready' and 2 or 3] or 0) + went)
    end
    taken = taken + gone
    if gone < n then
      call('ZINCRBY', of, -gone * AGE_MS, group)
      return false
    end
    call('ZREM', of, group)
    if by_group then call('ZREM', B .. 'priority:' .. typ .. ':' .. lane, group) end
    return call('ZCARD', of) == 0
  end
end
