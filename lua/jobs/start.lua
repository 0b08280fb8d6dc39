-- start: starts jobs that a worker process has read.
-- State: ready → in flight; a paused job: ready → non-ready, suspended. A sealed group: CREATED |
--   DISPATCHED → RUNNING, at its first start
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  typ       -       the type
--   2  groups    groups  number of groups
--   then for each group:
--   +1  group    -  the group's id
--   +2  ranges   -  the jobs (see parts/ranges.lua)
--   +3  entries  -  their entries in the ready stream, in the same order, joined by spaces
--   +4  failed   -  the ordinals of those that have had errors in this round, joined by spaces
-- Reply
--   {tokens, groups, now}
--     tokens  for each group: 'all' = run all jobs and report each under its own attempt; or a
--             list, with a number for each job: the attempt to report under; -1 = do not run it;
--             -2 = do not run it, because its group was cancelled while it was ready
--     groups  for each group: {tenant, job timeout ms, max retries, errors}, '' = the default;
--             tenant '' = there is no such group. errors has the two newest lines of the record in
--             errors:GROUP for each ordinal in failed: the first one may be a deferral. errors is
--             empty if the records can't be read
--     now     Redis time, µs
-- A job with a negative token is stale, of a cancelled or deleted group, or suspended now. Its
-- entry is removed, unless the job is stale and ready or in flight under another attempt: then
-- reclaim decides which entry is right.
-- The state's letter and attempt say which worker holds the job. An entry that is delivered again
-- under its old id (the consumer group was lost and created again) gets a new attempt, so that
-- reports of the earlier one are stale.
-- Twice: the second call starts a new attempt.
-- Out of memory: goes through.
-- Cost: some µs a group; 1 µs a job where a group's jobs differ in state, and 1 µs a job that has
-- had errors.
local typ, groups, arg = ARGV[1], tonumber(ARGV[2]), 3
local stream = B .. 'ready:' .. typ
local us, load_key = now_us(), B .. 'load:' .. typ
local now, tokens, about, gone = floor(us / 1000), {}, {}, {} -- gone: entries to remove
local started = 0
local pauses = any_paused()
local type_paused = pauses and is_paused('y', typ)
precheck('XLEN', stream)
precheck('HLEN', load_key)
precheck('LLEN', B .. 'wake:fetcher')
precheck_announce()
allow_oom()

-- suspend moves paused jobs from the ready stream to suspended:TENANT, and writes their states and
-- counts. at lists their indexes in entries. It reads their blobs from the stream, because the
-- worker sends only the ids of their entries.
local function suspend(group, tenant, entries, ords, attempts, at)
  precheck_non_ready(tenant, typ)
  precheck('ZCARD', B .. 'suspended:' .. tenant)
  precheck('SCARD', B .. 'suspended')
  local n = 0
  for _, i in ipairs(at) do
    local found = call('XRANGE', stream, entries[i], entries[i])
    local blob = #found > 0 and entry_blob(found[1][2])
    local j = blob and parse(blob)
    if j then
      j.since, j.reason, n = now, 'P', n + 1
      call('ZADD', B .. 'suspended:' .. tenant, now, compose(j, blob))
      call('SETRANGE', B .. 'states:' .. group, ords[i] * 2, 'N' .. mark(attempts[i]))
      gone[#gone + 1] = entries[i]
    end
  end
  if n == 0 then return end
  call('SADD', B .. 'suspended', tenant)
  call('HINCRBY', load_key, 'non_ready', n)
  add(B .. 'group:' .. group, 'ready', -n, 'non_ready', n)
end

-- begin starts the jobs of a group one at a time, and suspends those that are paused. It returns
-- the tokens, and how many jobs went from ready to in flight. It adds the entries that must be
-- removed to gone.
local function begin(group, g, held, ranges, ids)
  local ords, attempts = expand(ranges)
  local entries, own = {}, {}
  for id in string.gmatch(ids, '%S+') do entries[#entries + 1] = id end
  local states, span = load_states(group, ords)
  local new, begun, paused = {}, 0, {}
  for i = 1, #ords do
    local state, token = states[i], -1
    if g[1] and g[1] ~= 'CANCELLED' then
      local mine = mark(attempts[i])
      if state == 'R' .. mine and held then
        paused[#paused + 1] = i
      elseif state == 'R' .. mine then
        token, begun = attempts[i], begun + 1
      elseif state == 'I' .. mine then
        token = attempts[i] + 1
      end
    elseif g[1] and string.find(state, '^[CR]') and string.sub(state, 2) == mark(attempts[i]) then
      token = -2
    end
    if token >= 0 then
      new[i] = 'I' .. mark(token)
    elseif not g[1] or g[1] == 'CANCELLED' or not string.find(state, '^[RI]') then
      gone[#gone + 1] = entries[i]
    end
    own[i] = token
  end
  store_states(group, ords, new, span)
  if #paused > 0 then suspend(group, g[3], entries, ords, attempts, paused) end
  return own, begun
end

-- last_errors returns the two newest errors of each of these jobs. It returns none if they can't be
-- read: an error would stop the script, which has already started the jobs of other groups.
local function last_errors(group, list)
  local ords = {}
  for ordinal in string.gmatch(list, '%d+') do ords[#ords + 1] = ordinal end
  local found = redis.pcall('HMGET', B .. 'errors:' .. group, unpack(ords))
  if found.err then return {} end
  for i = 1, #ords do
    local record = found[i] or ''
    local first = string.find(record, '\n', 1, true)
    local second = first and string.find(record, '\n', first + 1, true)
    found[i] = second and string.sub(record, 1, second - 1) or record
  end
  return found
end

-- begin_group writes the first start of a group, of which `begun` jobs are in flight now. Whoever
-- seals an unsealed group, or requeues one, moves it later.
local function begin_group(group, begun)
  local g, hash = load_group(group)
  local changes = { 'started', now, 'ready', tonumber(g.ready or 0) - begun, 'in_flight', tonumber(g.in_flight or 0) + begun }
  for i = 1, #changes, 2 do
    changes[i + 1] = string.format('%.0f', changes[i + 1])
    g[changes[i]] = changes[i + 1]
  end
  move(group, g, hash, changes, now, true)
end

-- release removes the entries gone[from] and later ones, and counts them: an earlier call may have
-- removed them before. It does nothing if the tenant has no bound, or its hash can't be read: an error
-- would stop the script, which has already started jobs.
local function release(tenant, from)
  local t = redis.pcall('HMGET', B .. 'tenant:' .. tenant, 'in_flight', 'places', 'held')
  if t[1] then free_known(tenant, call('XDEL', stream, unpack(gone, from)), t) end
end

for _ = 1, groups do
  local group, ranges, n = ARGV[arg], parse_ranges(ARGV[arg + 1])
  local left = #gone
  local key = B .. 'group:' .. group
  local g = call('HMGET', key, 'status', 'started', 'tenant', 'job_timeout', 'max_retries', 'paused')
  local errors = ARGV[arg + 3] ~= '' and last_errors(group, ARGV[arg + 3]) or {}
  local held = g[6] or type_paused or (pauses and g[3] and is_paused('t', g[3]))
  local own, begun = 'all', n
  local all = g[1] and g[1] ~= 'CANCELLED' and not held and transition(group, ranges, 'R', 'I')
  if all then apply(group, all) else own, begun = begin(group, g, held, ranges, ARGV[arg + 2]) end
  arg = arg + 4
  if #gone > left and g[3] then release(g[3], left + 1) end
  tokens[#tokens + 1] = own
  if begun > 0 then
    started = started + begun
    if g[2] then add(key, 'ready', -begun, 'in_flight', begun) else begin_group(group, begun) end
  end
  about[#about + 1] = { g[3] or '', g[4] or '', g[5] or '', errors }
end
add(load_key, 'started', started)
if #gone > 0 then
  call('XACK', stream, 'workers', unpack(gone))
  call('XDEL', stream, unpack(gone))
end
refill(typ)
return { tokens, about, us }
