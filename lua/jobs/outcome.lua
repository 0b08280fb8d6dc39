-- outcome: stores the outcomes of jobs that a worker has run or read.
-- State: in flight → done, failed or non-ready; unstarted: ready → ready; deferred: ready or in
-- flight → non-ready
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  typ          -        the type
--   2  least        ms       least wait of a retried job, or of a throttled one without Retry-After
--   3  cap          ms       longest wait of such a job
--   4  rps          1/s      permits of all tenants of the partition; 0 = no limit, '' = waits
--                            depend on no limit, not even on a tenant's own
--   5  keep         ms       how long congestion statistics are kept after a tenant's last event
--   6  groups       groups   number of groups
--   7  all_entries  entries  number of entries
--   then for each job of each group, the done jobs of a group first:
--   +1  entry      -     its entry in the ready stream
--   then for each group:
--   +1  group      -     the group's id
--   +2  n_done     jobs  number of done jobs
--   +3  n_other    jobs  number of other jobs
--   +4  took       ms    run time, added up, of its jobs here that ran and were neither released
--                        nor deferred
--   +5  ran        jobs  how many these are
--   then, if the group has done jobs:
--   +1  ranges     -     the done jobs (see parts/ranges.lua)
--   +2  lines      -     their result lines
--   +3  traces     -     a line 'ordinal trace' for each traced job
--   +4  marked     -     ordinals of jobs that may have a stored error or payload, joined by spaces
--   then for each other job, by ascending ordinal:
--   +1  ordinal    n     the job
--   +2  attempt    n     the attempt that the worker reports on
--   +3  kind       -     r retry, t throttled by the downstream API, f failed, h released,
--                        u unstarted, d deferred because a resource is busy
--   +4  retries    n     its retries
--   +5  throttles  n     its throttles
--   +6  losses     n     its losses
--   +7  waits      -     fair|rate|congestion, ms
--   +8  queued     -     its queued blob
--   +9  delay      ms    least wait; of kind t: the Retry-After, or the least wait as -delay; of
--                        kind d: the wait
--   +10 code       -     error code
--   +11 message    -     error text
-- Reply
--   {owned, stale, failed, steps}
--     owned, stale  outcomes that took effect, and stale ones
--     failed        jobs that have failed
--     steps         the sampled jobs that have failed, and those whose outcome is stale because
--                   their group was cancelled (see parts/blob.lua)
-- A stale outcome changes nothing but the counter stale of load:TYPE, which does not count those of
-- cancelled or deleted groups. Its entry is removed too, unless it may hold the job's present
-- attempt. All outcomes of a cancelled or deleted group are stale.
-- Each group with done jobs that are not stale adds one entry to the stream results.
-- A job that is to run again after an error or a deferral keeps it and the newest errors before it
-- in errors:GROUP. A done job keeps none.
-- Twice: all outcomes of the second call are stale.
-- Out of memory: goes through.
-- Cost: 1 µs a done job and some µs a group; 4 µs another job.
local typ, least, cap, rps = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]) -- rps: or nil
local keep, groups, all_entries = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local job, arg = 0, 8 + all_entries -- number of the job that was read last; index of the next argument
local stream = B .. 'ready:' .. typ
-- kept is the set of the jobs, as numbers in the order of ARGV, whose entries stay in the stream.
-- refused counts the stale outcomes of groups that are neither cancelled nor deleted.
-- gone are the entries of a group's stale outcomes that do not stay; they may be removed already.
local now, kept, gone, owned, stale, refused = now_ms(), {}, {}, 0, 0, 0
local all_done, all_failed, all_retried = 0, 0, 0
local since = string.format('%.0f', now)
precheck('XLEN', stream, B .. 'results')
precheck('SCARD', B .. 'active')
precheck('HLEN', B .. 'load:' .. typ)
precheck('LLEN', B .. 'wake:fetcher', B .. 'wake:aggregator')
precheck_mark_dirty()
allow_oom()

local active, factor = math.max(1, call('SCARD', B .. 'active')), alpha()
local load = call('HMGET', B .. 'load:' .. typ, 'est', 'quick', 'quick_at')
local est = tonumber(load[1] or nil)
-- charged is the run time (ms) that admit has charged for a job of a tenant whose mean run time was
-- not known.
local charged = load[2] and now - tonumber(load[3]) <= QUICK_MS and tonumber(load[2]) or est or 1
local quickest -- the lowest mean run time of a tenant in this batch, ms

-- congestion returns the wait (ms) of a retried or throttled job. n is the number of the tenant's
-- congested jobs before it:
--   least + n / rate * 1 s
-- The rate is permits a second: the tenant's own limit, or an equal part of rps for each active
-- tenant, rounded down, but at least 1; without a limit the wait is least. If own is less than 1,
-- it is the rate, and the time of one permit replaces least if it is longer. The wait is at least
-- delay, but never more than cap.
local function congestion(n, delay, own)
  local wait = least
  if own and own < 1 then
    wait = math.max(least, math.ceil(1000 / own)) + n * 1000 / own
  elseif own or rps and rps > 0 then
    wait = least + n * 1000 / math.max(1, floor(own or rps / active))
  end
  return math.min(cap, math.max(floor(wait), delay))
end

-- next_entry decides whether the next job's entry stays in the ready stream, and then adds the job
-- to kept; the entry of another stale outcome it adds to gone. It must be called once for each job, in the order of ARGV. An entry is removed with its
-- outcome. But the entry of a stale outcome may belong to a later attempt (see start), or to a job
-- whose start Redis has lost in a failover. So it stays while the job is ready or in flight, and
-- reclaim decides.
local function next_entry(live, mine, state)
  job = job + 1
  if mine then return end
  if live and string.find(state, '^[RI]') then kept[job] = true else gone[#gone + 1] = ARGV[7 + job] end
end

-- check_each checks the done jobs of a group one by one and writes nothing. It returns the result
-- lines of the jobs that the worker owns, a function that selects these jobs' items from a list,
-- and a function that writes their states.
local function check_each(group, live, ranges, text)
  local ords, attempts = expand(ranges)
  local new, lines, mine_at, i = {}, {}, {}, 0
  local states, span = load_states(group, ords)
  for line in string.gmatch(text, '[^\n]+') do
    i = i + 1
    local m = mark(attempts[i])
    local mine = live and states[i] == 'I' .. m
    next_entry(live, mine, states[i])
    if mine then new[i], lines[#lines + 1], mine_at[ords[i]] = 'D' .. m, line, true end
  end
  local function only_mine(list, pattern)
    local out = {}
    for item in string.gmatch(list, pattern) do
      if mine_at[tonumber(string.match(item, '^%d+'))] then out[#out + 1] = item end
    end
    return out
  end
  return lines, only_mine, function() store_states(group, ords, new, span) end
end

-- note_cancelled adds a sampled job of a cancelled group to steps, if the worker that reports held
-- the job.
local function note_cancelled(group, tenant, ordinal, attempt, trace)
  local state = call('GETRANGE', B .. 'states:' .. group, ordinal * 2, ordinal * 2 + 1)
  if string.find(state, '^[CIR]') and string.sub(state, 2) == mark(attempt) then
    note_step('cancel', group, ordinal, tenant, trace, attempt, '')
  end
end

-- store_done reads the done jobs of a group from ARGV. For those that the worker owns it adds one
-- entry to the stream results, writes their states, and deletes their stored errors and payloads.
-- It returns how many they are. The caller writes the counts.
local function store_done(group, live, tenant, aggregates)
  local ranges, n = parse_ranges(ARGV[arg])
  local lines, traces, marked = ARGV[arg + 1], ARGV[arg + 2], ARGV[arg + 3]
  arg = arg + 4
  local whole = live and transition(group, ranges, 'I', 'D')
  local function store() apply(group, whole) end
  if whole then
    job = job + n
  else
    local found, only_mine
    found, only_mine, store = check_each(group, live, ranges, lines)
    if traces ~= '' and tenant and not live then
      local ords, attempts = expand(ranges)
      for i = 1, #ords do
        local trace = string.match('\n' .. traces, '\n' .. ords[i] .. ' ([^\n]+)')
        if trace then note_cancelled(group, tenant, ords[i], attempts[i], trace) end
      end
    end
    n, lines = #found, table.concat(found, '\n')
    traces = table.concat(only_mine(traces, '[^\n]+'), '\n')
    marked = table.concat(only_mine(marked, '%d+'), ' ')
    if n == 0 then return 0 end
  end
  local clear = {}
  for ordinal in string.gmatch(marked, '%d+') do clear[#clear + 1] = ordinal end
  if #clear > 0 then precheck('HLEN', B .. 'errors:' .. group, B .. 'payloads:' .. group) end
  call('XADD', B .. 'results', '*', 'g', group, 'l', lines, 't', traces, 'p', aggregates and '' or tenant)
  store()
  if #clear > 0 then
    call('HDEL', B .. 'errors:' .. group, unpack(clear))
    call('HDEL', B .. 'payloads:' .. group, unpack(clear))
  end
  return n
end

-- REASONS is the reason of a non-ready job, by the kind of its outcome.
local REASONS = { r = 'E', t = 'A', h = '', d = 'G' }

-- store_others reads n jobs that are not done from ARGV, moves those that the worker owns, and
-- writes their states, errors and the congestion statistics. It returns how many have failed, how
-- many are non-ready, how many of these were ready before, and how many are ready again because no
-- slot had started them. The caller writes the counts of these states.
local function store_others(group, live, tenant, round, n)
  local ords, names, new, blobs, errors, failed, readied, retries, first = {}, {}, {}, {}, {}, 0, 0, 0, arg
  local repeated = false -- whether a job may have errors: none has before its second attempt
  for i = 1, n do
    names[i], ords[i], repeated = ARGV[arg], tonumber(ARGV[arg]), repeated or ARGV[arg + 1] ~= '1'
    arg = arg + 11
  end
  local states, span = load_states(group, ords)
  local head = group .. '|' .. typ .. '|'
  local congested, own, waits, longest, returns, added, unstarted = 0, nil, 0, 0, 0, 0, 0
  local earlier = live and repeated and call('HMGET', B .. 'errors:' .. group, unpack(names)) or {}
  if live then
    local t = call('HMGET', B .. 'tenant:' .. tenant, 'congested', 'rps')
    congested, own = math.max(0, tonumber(t[1] or 0)), rps and tonumber(t[2] or nil)
  end
  for i = 1, n do
    local at = first + (i - 1) * 11
    -- attempt stays text: to make text of a number costs as much as a small command
    local ordinal, attempt, kind, queued = ords[i], ARGV[at + 1], ARGV[at + 2], ARGV[at + 7]
    local delay, code, message = tonumber(ARGV[at + 8]), ARGV[at + 9], ARGV[at + 10]
    local state, m = states[i], mark(attempt)
    local counts = '|' .. ARGV[at + 3] .. '|' .. ARGV[at + 4] .. '|' .. ARGV[at + 5] .. '|' .. ARGV[at + 6] .. '|'
      .. since .. '|'
    -- A worker that reports a job as unstarted may be wrong: Redis started the job, and the reply
    -- was lost.
    if kind == 'u' and state == 'I' .. m then kind = 'h' end
    local mine = live and (state == (kind == 'u' and 'R' or 'I') .. m or kind == 'd' and state == 'R' .. m)
    next_entry(live, mine, state)
    if tenant and not live then
      note_cancelled(group, tenant, ordinal, tonumber(attempt), string.match(queued, '^%d+|%d+|([^|]*)') or '')
    end
    if mine then
      if kind == 'f' then
        local blob = head .. attempt .. counts .. '|' .. queued
        fail_job(group, tenant, round, parse(blob), blob, code, message, now)
        new[i], failed = 'F' .. m, failed + 1
      elseif kind == 'u' then
        call('XADD', stream, '*', 'j', head .. (attempt + 1) .. counts .. '|' .. queued)
        new[i], readied = 'R' .. mark(attempt + 1), readied + 1
      else
        local wait, reason = 0, REASONS[kind]
        if kind == 'd' or kind == 't' and delay > 0 then
          wait = delay
        elseif kind ~= 'h' then
          wait = congestion(congested + added, math.abs(delay), own)
        end
        if kind == 'd' and state == 'R' .. m then unstarted = unstarted + 1 end
        if is_congested(reason) then
          added = added + 1
          if kind ~= 'h' then returns, waits, longest = returns + 1, waits + wait, math.max(longest, wait) end
        end
        if kind ~= 'h' then
          errors[#errors + 1] = names[i]
          errors[#errors + 1] = with_error(earlier[i], {
            ordinal = ordinal, code = code, error = message, attempts = tonumber(attempt), at = now,
            ['until'] = now + wait, reason = reason,
          })
        end
        if kind == 'r' then retries = retries + 1 end
        blobs[#blobs + 1] = now + wait
        blobs[#blobs + 1] = head .. attempt .. counts .. reason .. '|' .. queued
        new[i] = 'N' .. m
      end
    end
  end
  local non_ready = #blobs / 2
  if non_ready > 0 then
    if #errors > 0 then call('HSET', B .. 'errors:' .. group, unpack(errors)) end
    add_non_ready(tenant, typ, blobs)
    add(B .. 'tenant:' .. tenant, 'congested', added)
  end
  if returns > 0 then
    local stats = B .. 'congestion:' .. tenant
    add(stats, 'returns', returns, 'waited', waits)
    if longest > tonumber(call('HGET', stats, 'longest') or 0) then call('HSET', stats, 'longest', longest) end
    call('HSET', stats, 'last', now)
    call('PEXPIRE', stats, keep)
  end
  store_states(group, ords, new, span)
  add(B .. 'group:' .. group, 'retries', retries)
  all_retried = all_retried + retries
  return failed, non_ready, unstarted, readied
end

-- store_tenant stores what admit needs to charge a tenant: est, the mean run time of its jobs of
-- the type, and owe, the run time that its jobs took beyond what was charged (it may be negative);
-- a job costs at least 1 ms. It also counts ended jobs and stores pace, two marks of time and this
-- count, at least 5 s apart: from them follows the speed. Ended jobs are no longer unfinished. It
-- updates the variables est, the type's mean run time, and quickest. removed entries of its jobs leave
-- the ready stream.
local PACE_MS = 5000
local function store_tenant(tenant, took, ran, ended, removed)
  local key = B .. 'tenant:' .. tenant
  local t = call('HMGET', key, 'est:' .. typ, 'owe:' .. typ, 'ended', 'pace', 'unfinished', 'in_flight', 'places', 'held')
  free_known(tenant, removed, { t[6], t[7], t[8] })
  local had, set = tonumber(t[1] or charged), {}
  if ran > 0 then
    local mean = took / ran
    local new = t[1] and had + (mean - had) * math.min(1, ran / 20) or mean
    set[1], set[2] = 'est:' .. typ, string.format('%.3f', new)
    local owe = tonumber(t[2] or 0) + math.max(ran, took) - ran * math.max(1, had)
    set[3], set[4] = 'owe:' .. typ, string.format('%.3f', owe)
    if not quickest or mean < quickest then quickest = mean end
    est = est and est + (mean - est) * math.min(1, ran / 100) or mean
  end
  if ended > 0 then
    local all = tonumber(t[3] or 0) + ended
    set[#set + 1], set[#set + 2] = 'ended', all
    set[#set + 1], set[#set + 2] = 'unfinished', tonumber(t[5] or 0) - ended
    local _, _, newer = string.find(t[4] or '', '([^ ]+ [^ ]+)$')
    local at = tonumber(string.match(newer or '', '^[^ ]+') or nil)
    if not at or now - at >= PACE_MS then
      set[#set + 1], set[#set + 2] = 'pace', (newer and newer .. ' ' or '') .. since .. ' ' .. all
    end
  end
  if #set > 0 then call('HSET', key, unpack(set)) end
end

local last = false -- whether all jobs of a sealed group have ended
for _ = 1, groups do
  local group, n_done, n_other = ARGV[arg], tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  local took, ran = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
  arg = arg + 5
  local key = B .. 'group:' .. group
  local g = call('HMGET', key, 'tenant', 'status', 'round', 'types', 'sealed', 'accepted', 'done', 'failed',
    'cancelled', 'aggregate', 'in_flight', 'ready', 'non_ready')
  local live, tenant = g[1] and g[2] ~= 'CANCELLED', g[1]
  local done, failed, non_ready, unstarted, readied = 0, 0, 0, 0, 0
  gone = {}
  if tenant then precheck('HLEN', B .. 'tenant:' .. tenant) end
  if live then
    precheck_rerank(g[4], factor)
  end
  if live and n_other > 0 then
    precheck_non_ready(tenant, typ)
    precheck_fail_job(group)
    precheck('HLEN', B .. 'errors:' .. group, B .. 'congestion:' .. tenant)
  end
  if n_done > 0 then done = store_done(group, live, tenant, g[10]) end
  if n_other > 0 then
    failed, non_ready, unstarted, readied = store_others(group, live, tenant, tonumber(g[3]), n_other)
  end
  -- A job that is ready again has another entry for the one that is removed. Of stale outcomes only
  -- those entries count that are removed now, and not by an earlier report or by reclaim.
  local removed = done + failed + non_ready
  if #gone > 0 then removed = removed + call('XDEL', stream, unpack(gone)) end
  if done + failed + non_ready == 0 and tenant then
    free_places(tenant, removed)
  elseif tenant then
    local counts = {}
    for field, change in pairs({
      in_flight = { g[11], unstarted - done - failed - non_ready }, ready = { g[12], -unstarted }, done = { g[7], done },
      failed = { g[8], failed }, non_ready = { g[13], non_ready },
    }) do
      if change[2] ~= 0 then counts[#counts + 1], counts[#counts + 2] = field, tonumber(change[1] or 0) + change[2] end
    end
    call('HSET', key, unpack(counts))
    if done + failed > 0 then
      local ended = tonumber(g[7] or 0) + tonumber(g[8] or 0) + tonumber(g[9] or 0) + done + failed
      if g[5] and tonumber(g[6] or 0) <= ended then
        -- reduce ends a group whose last jobs are done. It stays dirty until then, but the watcher
        -- need not wake for it.
        if done > 0 then call('SADD', B .. 'dirty', group) else mark_dirty(group) end
        last = true
      end
      rerank(group, g[4], factor)
    end
    store_tenant(tenant, took, ran, done + failed, removed)
  end
  local took_effect = done + failed + non_ready + readied
  all_done, all_failed = all_done + done, all_failed + failed
  owned, stale = owned + took_effect, stale + n_done + n_other - took_effect
  if live then refused = refused + n_done + n_other - took_effect end
end
if quickest then
  call('HSET', B .. 'load:' .. typ, 'est', string.format('%.3f', est))
  -- quick is about the lowest mean run time of a tenant in a batch of the last QUICK_MS: it is also
  -- replaced by a value up to half higher.
  if not load[2] or quickest <= tonumber(load[2]) * 1.5 or now - tonumber(load[3]) > QUICK_MS then
    call('HSET', B .. 'load:' .. typ, 'quick', string.format('%.3f', quickest), 'quick_at', now)
  end
end
add(B .. 'load:' .. typ, 'stale', refused, 'done', all_done, 'failed', all_failed, 'retried', all_retried)
local from, entries = 8, ARGV
if next(kept) then
  from, entries = 1, {}
  for i = 1, all_entries do
    if not kept[i] then entries[#entries + 1] = ARGV[7 + i] end
  end
end
local to = entries == ARGV and 7 + all_entries or #entries
if from <= to then
  call('XACK', stream, 'workers', unpack(entries, from, to))
  call('XDEL', stream, unpack(entries, from, to))
end
if last then wake('aggregator') end
refill(typ)
return { owned, stale, all_failed, steps }
