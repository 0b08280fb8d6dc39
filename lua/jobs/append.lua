-- append: adds jobs to a group.
-- State: (no job) → waiting, or non-ready until their run_at
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group     -     the group's id
--   2  limit     jobs  most jobs of a group
--   3  mode      -     last: the submission ends with these jobs; seal: also, the group is sealed;
--                      '' = neither. Only with a single request
--   4  form      -     form of the jobs below: ready or ''
--   5  requests  n     number of requests
--   then for each request:
--   +1  request  -     its id: '' = none; @ENTRY#N = piece N (from 0) of an ingest entry; =N =
--                      piece N of the submission; any other id: a piece of a message
--   +2  n        jobs  number of its jobs
--   then for each job of each request, in the form ready:
--   +1  blob     -     the queued blob that results if the ordinal and the time are guessed right
--   then for each job of each request, in the form '':
--   +1  typ      -     its type, '' = the group's type
--   +2  run_at   ms    it does not start before; 0 = at once
--   +3  trace    -     its traceparent, '' = it is not sampled
--   +4  payload  -     its payload, and its key behind it
-- Reply
--   one of these for each request:
--   {'OK', first, n, skipped}   n jobs have the ordinals from first on
--   {'DUP', skipped}            this request was applied before, or with a mode: the submission has
--                               ended before
--   {'GAP', pieces}             pieces number `pieces` and up, before this one, are missing
--   {'NOGROUP'}                 there is no such group
--   {'SEALED', status}          the group gets no more jobs
--   {'TOTAL', total, accepted}  there would be more jobs than were announced
--   {'LIMIT', accepted}         there would be more jobs than limit
-- Each request is accepted or refused as a whole. All accepted ones are written together. A group
-- that reaches its announced total is sealed.
-- In a group with unique_keys, jobs whose key another job of the group has are skipped, and do not
-- count in n. skipped is 'number,…' of these jobs, from 0 in their request; '' = none. It is absent
-- in other groups. The hash keys:GROUP holds key → ordinal and, for DUP, the skipped jobs of each
-- request with an id that has skipped some, under the byte 31 and the request's id.
-- Twice, with a request id: the second call answers DUP while the id is stored. So it does with a
-- mode, as long as the group exists.
-- Out of memory: refused. The first write is RPUSH, HSET or ZADD.
-- Cost: 1 µs a job and some µs a group.
local LARGE = 4096 -- bytes; a larger payload is stored in payloads:GROUP
local group, limit, mode, requests = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[5])
local composed = ARGV[4] == 'ready'
local key, arg = B .. 'group:' .. group, 6 + 2 * requests
local g = call('HMGET', key, 'tenant', 'type', 'lane', 'status', 'accepted', 'sealed', 'total', 'run_at', 'types',
  'submitted', 'pieces', 'paused', 'unique_keys')
local tenant, group_type, lane, status, accepted, total = g[1], g[2], g[3], g[4], tonumber(g[5] or 0), tonumber(g[7])
local first, sealed, replies = accepted, g[6] or status == 'CANCELLED', {}
-- The ids of accepted requests: entries and messages are {score, id, …}, which the script adds to
-- two sorted sets at its end; applied has all these ids as keys. pieces is the group's new count
-- of pieces; nil = unchanged.
local entries, messages, applied, pieces = {}, {}, {}, nil
-- These lists are for a group with unique keys: key_index is {key, ordinal, …} of the new jobs,
-- new_keys has their keys as a set, and skips has the skipped jobs of accepted requests, by id.
local key_index, new_keys, skips = {}, {}, {}

local now = now_ms()
local group_run_at = tonumber(g[8] or 0)
-- held: the group is scheduled or paused. Its jobs do not enter the fair queue: schedule or pause
-- enqueues them later. A group whose run_at has come is held until schedule has released it, so
-- that its jobs are counted once as wanting a permit.
local scheduled = group_run_at > 0 and (group_run_at > now or call('ZSCORE', B .. 'scheduled', group) ~= false)
local held = scheduled or g[12]
local factor = alpha()
-- By type, queues has the queued blobs of waiting jobs, and later {due time, moving blob, …} of
-- non-ready jobs; order lists the types. states has the states of all new jobs, large {ordinal,
-- payload, …}.
local queues, later, order, states, large, waiting = {}, {}, {}, {}, {}, 0

-- judge returns the reply to a request of n jobs: accepted, a duplicate, or refused. It adds the id
-- of an accepted request to the ids that the script stores at its end.
local function judge(request, n)
  if not tenant then return { 'NOGROUP' } end
  -- Pieces of the submission come in order. The group's hash counts them as long as the group
  -- exists. A failover may have lost the piece before this one.
  local piece = tonumber((string.match(request, '^=(%d+)$')))
  if piece and piece > tonumber(g[11] or 0) then return { 'GAP', g[11] or 0 } end
  if mode ~= '' and g[10] then return { 'DUP' } end
  if piece and piece < tonumber(g[11] or 0) then return { 'DUP' } end
  -- An entry of the ingest stream is delivered again only while it is pending there. So the request
  -- ids of entries are in a sorted set of their own and are remembered for a shorter time than
  -- others.
  local entry_ms = string.match(request, '^@(%d+)%-')
  local known = B .. (entry_ms and 'entries' or 'messages')
  if request ~= '' and not piece and (applied[request] or call('ZSCORE', known, request)) then return { 'DUP' } end
  if sealed then return { 'SEALED', status } end
  if total and accepted + n > total then return { 'TOTAL', total, accepted } end
  if accepted + n > limit then return { 'LIMIT', accepted } end
  if piece then
    g[11] = piece + 1
    pieces = g[11]
  elseif request ~= '' then
    local list = entry_ms and entries or messages
    list[#list + 1], list[#list + 2] = entry_ms or now, request
    applied[request] = true
  end
  return { 'OK', accepted, n }
end

-- queued returns the queued blob of the next job, whose ordinal is the count accepted, and adds 1
-- to accepted. A large payload goes to the list large instead of the blob.
local at_ms = string.format('|%.0f|', now)
local function queued(trace, payload)
  if #payload > LARGE then
    local text = payload_and_key(payload)
    if #text > LARGE then
      large[#large + 1] = accepted
      large[#large + 1] = text
      payload = string.sub(payload, #text + 1)
    end
  end
  accepted = accepted + 1
  return string.format('%d', accepted - 1) .. at_ms .. trace .. '|' .. payload
end
local function queue_of(typ)
  if not queues[typ] then queues[typ], later[typ], order[#order + 1] = {}, {}, typ end
  return queues[typ], later[typ]
end
-- as_guessed says whether a blob that the caller has composed has the right ordinal and acceptance
-- time: the group's next ordinal, and a time at most 1 s before and 0.1 s after Redis's clock.
local function as_guessed(blob)
  local ordinal, at = string.match(blob, '^(%d+)|(%d+)|')
  at = tonumber(at or nil)
  return tonumber(ordinal or nil) == accepted and at and at >= now - 1000 and at <= now + 100
end
-- key_of returns the key of the i-th job, from 0, of the present request; '' = it has none.
local function key_of(i)
  local _, job_key = payload_and_key(ARGV[composed and arg + i or arg + 4 * i + 3])
  return job_key
end
-- find_skipped returns which of the request's n jobs have a key that another job of the group, or
-- an earlier job of this call, has: as a list of numbers from 0, and as a set. Both are empty in a
-- group without unique_keys.
local function find_skipped(n)
  local list, set, job_keys = {}, {}, {}
  if not g[13] or n == 0 then return list, set end
  for i = 1, n do job_keys[i] = key_of(i - 1) end
  local known, here = call('HMGET', B .. 'keys:' .. group, unpack(job_keys)), {}
  for i, job_key in ipairs(job_keys) do
    if job_key ~= '' and (known[i] or new_keys[job_key] or here[job_key]) then
      list[#list + 1], set[i - 1] = i - 1, true
    end
    here[job_key] = true
  end
  return list, set
end
-- note_keys records the keys of n new jobs, which get the next ordinals; jobs in skip are left out.
-- The script stores them at its end.
local function note_keys(n, skip)
  local ordinal = accepted
  for i = 0, n - 1 do
    local job_key = key_of(i)
    if job_key ~= '' and not skip[i] then
      new_keys[job_key] = true
      key_index[#key_index + 1], key_index[#key_index + 2] = job_key, ordinal
    end
    if not skip[i] then ordinal = ordinal + 1 end
  end
end
-- read_composed reads n jobs in the form ready (see ARGV). Each is a queued blob, for which the
-- caller has guessed the ordinal and the time of acceptance. If the first blob is guessed right
-- (see as_guessed) and no job is skipped, all blobs are used unchanged. To compose them again would
-- cost more than the rest of the script, because Lua hashes each new string. skip is the set of the
-- jobs to leave out (see find_skipped); kept is the number of the others.
local function read_composed(n, skip, kept)
  local q, guessed = queue_of(group_type), kept == n and as_guessed(ARGV[arg])
  for i = arg, arg + n - 1 do
    if guessed then
      q[#q + 1] = ARGV[i]
    elseif not skip[i - arg] then
      q[#q + 1] = string.format('%d', accepted) .. at_ms .. string.match(ARGV[i], '^%d+|%d+|(.*)$')
      accepted = accepted + 1
    end
  end
  if guessed then accepted = accepted + n end
  states[#states + 1], waiting, arg = string.rep('W!', kept), waiting + kept, arg + n
end
-- read_each reads one job in the form '' from ARGV[at] on, and adds it to queues or later.
local function read_each(at)
  local typ, run_at, trace = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  if typ == '' then typ = group_type end
  local q, l = queue_of(typ)
  if run_at > now and run_at > group_run_at then
    states[#states + 1] = 'N!'
    l[#l + 1] = run_at
    l[#l + 1] = group .. '|' .. typ .. '|0|0|0|0|0|0|0' .. at_ms .. 'S|' .. queued(trace, ARGV[at + 3])
  else
    states[#states + 1], waiting = 'W!', waiting + 1
    q[#q + 1] = queued(trace, ARGV[at + 3])
  end
end
-- read_jobs reads the next n jobs of ARGV, in either form, and leaves out those in skip.
local function read_jobs(n, skip, kept)
  if composed then
    if kept > 0 then read_composed(n, skip, kept) else arg = arg + n end
    return
  end
  for i = 0, n - 1 do
    if not skip[i] then read_each(arg + 4 * i) end
  end
  arg = arg + 4 * n
end

local any_accepted = false
for i = 1, requests do
  local request, n = ARGV[4 + 2 * i], tonumber(ARGV[5 + 2 * i])
  local skipped, skip = find_skipped(n)
  local kept = n - #skipped
  replies[i] = judge(request, kept)
  if replies[i][1] ~= 'OK' then
    if g[13] and replies[i][1] == 'DUP' then
      replies[i][2] = skips[request] or call('HGET', B .. 'keys:' .. group, '\31' .. request) or ''
    end
    arg = arg + n * (composed and 1 or 4)
  else
    any_accepted = true
    if g[13] then
      replies[i][4] = table.concat(skipped, ',')
      if #skipped > 0 and request ~= '' then skips[request] = replies[i][4] end
      note_keys(n, skip)
    end
    read_jobs(n, skip, kept)
    sealed = sealed or (total and accepted == total)
  end
end
if not any_accepted then return replies end
local n = accepted - first
local sealing = mode == 'seal' or (total and accepted == total)

precheck('STRLEN', B .. 'states:' .. group)
precheck_rerank(g[9], factor)
precheck('ZCARD', B .. 'types')
if #entries > 0 then precheck('ZCARD', B .. 'entries') end
if #messages > 0 then precheck('ZCARD', B .. 'messages') end
precheck_activate(tenant)
for _, typ in ipairs(order) do
  precheck('LLEN', B .. 'queue:' .. group .. ':' .. typ)
  precheck('HLEN', B .. 'load:' .. typ)
  if not held then precheck_enqueue(typ, lane, tenant) end
  if #later[typ] > 0 then precheck_non_ready(tenant, typ) end
end
if #large > 0 then precheck('HLEN', B .. 'payloads:' .. group) end
if g[13] then precheck('HLEN', B .. 'keys:' .. group) end
if scheduled then
  precheck('ZCARD', B .. 'scheduled')
  precheck('LLEN', B .. 'wake:dispatcher')
elseif waiting > 0 then
  precheck('LLEN', B .. 'wake:fetcher')
end
if sealing then precheck_mark_dirty() end

if #large > 0 then call('HSET', B .. 'payloads:' .. group, unpack(large)) end
if #key_index > 0 then call('HSET', B .. 'keys:' .. group, unpack(key_index)) end
for request, skipped in pairs(skips) do call('HSET', B .. 'keys:' .. group, '\31' .. request, skipped) end
local types, known_types, new_types = g[9] or '', {}, {}
for typ in string.gmatch(types, '[^|]+') do known_types[typ] = true end
for _, typ in ipairs(order) do
  if not known_types[typ] then new_types[#new_types + 1] = typ end
end
if #new_types > 0 then
  types = (types == '' and '' or types .. '|') .. table.concat(new_types, '|')
  call('HSET', key, 'types', types)
end
for _, typ in ipairs(order) do
  local q = queues[typ]
  if #q > 0 then
    call('RPUSH', B .. 'queue:' .. group .. ':' .. typ, unpack(q))
    if not held then enqueue(typ, lane, tenant, group, #q, now, factor) end
  end
  if #later[typ] > 0 then add_non_ready(tenant, typ, later[typ]) end
  add(B .. 'load:' .. typ, 'waiting', #q, 'accepted', #q + #later[typ] / 2)
  if not call('ZSCORE', B .. 'types', typ) then call('ZADD', B .. 'types', now, typ) end
end
if scheduled then
  call('ZADD', B .. 'scheduled', group_run_at, group)
  wake('dispatcher')
end
if n > 0 then call('SETRANGE', B .. 'states:' .. group, first * 2, table.concat(states)) end
add(key, 'accepted', n, 'waiting', waiting, 'non_ready', n - waiting)
rerank(group, types, factor)
add(B .. 'tenant:' .. tenant, 'unfinished', n)
if not held then activate(tenant, waiting) end
if pieces then call('HSET', key, 'pieces', pieces) end
if #entries > 0 then call('ZADD', B .. 'entries', unpack(entries)) end
if #messages > 0 then call('ZADD', B .. 'messages', unpack(messages)) end
if mode ~= '' then call('HSET', key, 'submitted', 1) end
if sealing then
  call('HSET', key, 'sealed', 1)
  mark_dirty(group)
end
if waiting > 0 and not held then wake('fetcher') end
return replies
