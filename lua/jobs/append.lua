-- append: creates groups, and adds jobs to groups.
-- State: (no group) → CREATED, or DISPATCHED if the group is sealed with its jobs
-- State: (no job) → waiting, or non-ready until their run_at
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  groups  n     number of groups that follow; a group may follow twice
--   then for each group:
--   +1  group     -     its id
--   +2  limit     jobs  most jobs of the group
--   +3  mode      -     last: the submission ends with these jobs; seal: also, the group is sealed;
--                       '' = neither. Only with at most one request
--   +4  form      -     form of the jobs below: ready or ''
--   +5  requests  n     number of requests
--   +6  values    n     number of values with which the group is created; 0: it must exist
--   then, if values is above 0:
--   +1  tenant    -     its tenant
--   +2  typ       -     the type of jobs that name none
--   +3  hash      -     digest of the submission, by which a repetition is recognized
--   +4  owner     -     1: the tenant becomes the owner of the id, whose owner key is in this
--                       partition; 0 = it is the owner
--   then for each further field of the group's hash:
--   +1  field     -     its name
--   +2  value     -     its value
--   then for each request:
--   +1  request   -     its id: '' = none; @ENTRY#N = piece N (from 0) of an ingest entry; =N =
--                       piece N of the submission; any other id: a piece of a message
--   +2  n         jobs  number of its jobs
--   then for each job of each request, in the form ready:
--   +1  blob      -     the queued blob that results if the ordinal and the time are guessed right
--   then for each job of each request, in the form '':
--   +1  typ       -     its type, '' = the group's type
--   +2  run_at    ms    it does not start before; 0 = at once
--   +3  trace     -     its traceparent, '' = it is not sampled
--   +4  payload   -     its payload, and its key behind it
-- Reply
--   one of these for each group:
--   {'OK', status, request, …}  status is the group's before these jobs, CREATED if the call creates
--                               it, '' = there is none; request is for each request one of the lists
--                               below
--   {'CONFLICT', status}        another submission has created the group
--   {'TAKEN'}                   the id belongs to another tenant
--   {'TAGS', n, most}           it has a tag that no other group of its tenant has; they have n, as
--                               many as may be
--   {'ERR', text}               a key of the group is of a wrong type: nothing was written for it
--   one of these for each request:
--   {'OK', first, n, skipped}   n jobs have the ordinals from first on
--   {'DUP', skipped}            this request was applied before, or with a mode: the submission has
--                               ended before
--   {'GAP', pieces}             pieces number `pieces` and up, before this one, are missing
--   {'NOGROUP'}                 there is no such group
--   {'SEALED', status}          the group gets no more jobs
--   {'TOTAL', total, accepted}  there would be more jobs than were announced
--   {'LIMIT', accepted}         there would be more jobs than limit
-- Groups are written one after the other, each after its reads. Each request is accepted or refused
-- as a whole; all accepted ones of a group are written together. A group is not created if all its
-- requests are refused. A group that reaches its announced total is sealed; so is, with the mode
-- seal, one without requests. A new group that is sealed and has jobs is DISPATCHED at once, and
-- need not be dirty.
-- In a group with unique_keys, jobs whose key another job of the group has are skipped, and do not
-- count in n. skipped is 'number,…' of these jobs, from 0 in their request; '' = none. It is absent
-- in other groups. The hash keys:GROUP holds key → ordinal and, for DUP, the skipped jobs of each
-- request with an id that has skipped some, under the byte 31 and the request's id.
-- Twice: a group is created once. With a request id, the second call answers DUP while the id is
-- stored. So it does with a mode, as long as the group exists.
-- Out of memory: refused, all groups together. The first write is SET, ZADD, RPUSH or HSET.
-- The hash of a new group is written after its jobs and before it enters the fair queue, because it
-- is what says that the group exists: a script that loses a right in between leaves an id on lists,
-- which the audit finds, and jobs of no group, which a second call deletes.
-- Cost: 1 µs a job and some µs a group.
local LARGE = 4096 -- bytes; a larger payload is stored in payloads:GROUP
local MAX_TAGS = 1000 -- different tags of a tenant's groups
local now, factor = now_ms(), alpha()
local at_ms = string.format('|%.0f|', now)
local loads = {} -- waiting and accepted jobs of all groups, by type

-- announce_new announces the states of a new group. hash is its hash in the first of them; then it
-- is that in the last one.
local function announce_new(group, hash, dispatched)
  local at = string.format('%.0f', now)
  local moves = { 'CREATED', at }
  if dispatched then
    for i = 1, #hash, 2 do
      if hash[i] == 'status' then hash[i + 1] = 'DISPATCHED' end
    end
    hash[#hash + 1], hash[#hash + 2], moves[3], moves[4] = 'at:dispatched', at, 'DISPATCHED', at
  end
  announce(group, 1, moves, hash)
end

-- has reads, once in a call, whether one of the sorted sets of the partition has a member; put adds
-- a member of which has was asked, unless it is there.
local members = {}
local function has(key, member)
  local id = key .. member
  if members[id] == nil then members[id] = call('ZSCORE', B .. key, member) end
end
local function put(key, score, member)
  if not members[key .. member] then members[key .. member] = call('ZADD', B .. key, score, member) end
end

-- read_group reads the group whose arguments stand behind ARGV[at]. It returns the reply and, if
-- there is something to write, a function that writes it.
local function read_group(at)
  local group, limit, mode, composed = ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3], ARGV[at + 4] == 'ready'
  local requests, values = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local key, owner = B .. 'group:' .. group, B .. 'owner:' .. group
  local g = call('HMGET', key, 'tenant', 'type', 'lane', 'status', 'accepted', 'sealed', 'total', 'run_at', 'types',
    'submitted', 'pieces', 'paused', 'unique_keys', 'hash', 'at:created', 'round')
  -- fresh is the hash of a group that does not exist yet, {field, value, …}; fields
  -- are those that the script sets in the hash. owned: the tenant is the id's owner already.
  local fresh, owned, tags = nil, true, nil -- tags: those of a fresh group
  if values > 0 then
    local tenant, typ, hash = ARGV[at + 7], ARGV[at + 8], ARGV[at + 9]
    if ARGV[at + 10] == '1' then
      owned = call('GET', owner)
      if owned and owned ~= tenant then return { 'TAKEN' } end
    end
    if g[14] and g[14] ~= hash then return { 'CONFLICT', g[4] or '' } end
    if not g[14] then
      local given = {}
      fresh = { 'id', group, 'tenant', tenant, 'type', typ, 'hash', hash, 'status', 'CREATED', 'round', '1',
        'at:created', string.format('%.0f', now) }
      for i = at + 11, at + 6 + values, 2 do
        given[ARGV[i]] = ARGV[i + 1]
        fresh[#fresh + 1], fresh[#fresh + 2] = ARGV[i], ARGV[i + 1]
      end
      g = { tenant, typ, given.lane, 'CREATED', nil, nil, given.total, given.run_at, nil, nil, nil, nil, given.unique_keys }
      tags = given.tags
    end
  end
  at = at + 6 + values
  local arg = at + 1 + 2 * requests
  local fields = fresh or {}
  local tenant, group_type, lane, status, accepted, total = g[1], g[2], g[3], g[4], tonumber(g[5] or 0), tonumber(g[7] or nil)
  local first, sealed, reply = accepted, g[6] or status == 'CANCELLED', { 'OK', status or '' }
  -- The ids of accepted requests: entries and messages are {score, id, …}, which the script adds to
  -- two sorted sets at its end; applied has all these ids as keys. pieces is the group's new count
  -- of pieces; nil = unchanged.
  local entries, messages, applied, pieces = {}, {}, {}, nil
  -- These lists are for a group with unique keys: key_index is {key, ordinal, …} of the new jobs,
  -- new_keys has their keys as a set, and skips has the skipped jobs of accepted requests, by id.
  local key_index, new_keys, skips = {}, {}, {}

  local group_run_at = tonumber(g[8] or 0)
  -- held: the group is scheduled or paused. Its jobs do not enter the fair queue: schedule or pause
  -- enqueues them later. A group whose run_at has come is held until schedule has released it, so
  -- that its jobs are counted once as wanting a permit.
  local scheduled = group_run_at > 0 and (group_run_at > now or call('ZSCORE', B .. 'scheduled', group) ~= false)
  local held = scheduled or g[12]
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
    if request ~= '' and not piece then
      -- One that was applied before the group was created was of a deleted group with the same id.
      local seen = not applied[request] and call('ZSCORE', known, request)
      local older = seen and not entry_ms and g[16] == '1' and tonumber(seen) < tonumber(g[15])
      if applied[request] or seen and not older then return { 'DUP' } end
    end
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
    local ordinal, ms = string.match(blob, '^(%d+)|(%d+)|')
    ms = tonumber(ms or nil)
    return tonumber(ordinal or nil) == accepted and ms and ms >= now - 1000 and ms <= now + 100
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
    -- A new group has no jobs: keys that are there were left by an interrupted script.
    local known, here = fresh and {} or call('HMGET', B .. 'keys:' .. group, unpack(job_keys)), {}
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
  -- read_each reads one job in the form '' from ARGV[i] on, and adds it to queues or later.
  local function read_each(i)
    local typ, run_at, trace = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
    if typ == '' then typ = group_type end
    local q, l = queue_of(typ)
    if run_at > now and run_at > group_run_at then
      states[#states + 1] = 'N!'
      l[#l + 1] = run_at
      l[#l + 1] = group .. '|' .. typ .. '|0|0|0|0|0|0|0' .. at_ms .. 'S|' .. queued(trace, ARGV[i + 3])
    else
      states[#states + 1], waiting = 'W!', waiting + 1
      q[#q + 1] = queued(trace, ARGV[i + 3])
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
    local request, n = ARGV[at + 2 * i - 1], tonumber(ARGV[at + 2 * i])
    local skipped, skip = find_skipped(n)
    local kept = n - #skipped
    local answer = judge(request, kept)
    reply[2 + i] = answer
    if answer[1] ~= 'OK' then
      if g[13] and answer[1] == 'DUP' then
        answer[2] = skips[request] or call('HGET', B .. 'keys:' .. group, '\31' .. request) or ''
      end
      arg = arg + n * (composed and 1 or 4)
    else
      any_accepted = true
      if g[13] then
        answer[4] = table.concat(skipped, ',')
        if #skipped > 0 and request ~= '' then skips[request] = answer[4] end
        note_keys(n, skip)
      end
      read_jobs(n, skip, kept)
      sealed = sealed or (total and accepted == total)
    end
  end
  local n = accepted - first
  local sealing = not g[6] and status ~= 'CANCELLED' and (mode == 'seal' or any_accepted and accepted == total)
  if not any_accepted and (requests > 0 or not (fresh or sealing)) then
    if owned or fresh then return reply end
    return reply, function() call('SET', owner, tenant) end -- a failover has lost it
  end
  local dispatched = fresh and sealing and n > 0

  -- left: an interrupted script has left keys of the new group. They are deleted.
  local left, own = false, { B .. 'states:' .. group, B .. 'payloads:' .. group, B .. 'keys:' .. group }
  for _, typ in ipairs(order) do own[#own + 1] = B .. 'queue:' .. group .. ':' .. typ end
  if fresh then
    left = any_accepted and call('EXISTS', unpack(own)) > 0
    precheck('ZCARD', B .. 'groups', B .. 'groups:' .. tenant, B .. 'open')
    has('tenants', tenant)
    precheck_announce()
    if tags then
      precheck_tags(tenant, tags)
      local known, new = call('SCARD', B .. 'tags:' .. tenant), 0 -- earlier groups of the call count
      for pair in string.gmatch(tags, '[^\n]+') do
        new = new + 1 - call('SISMEMBER', B .. 'tags:' .. tenant, pair)
      end
      if new > 0 and known + new > MAX_TAGS then return { 'TAGS', known, MAX_TAGS } end
    end
  else
    precheck_rerank(g[9], factor)
  end
  if any_accepted then
    if left or not fresh then
      precheck('STRLEN', own[1])
      if left or #large > 0 then precheck('HLEN', own[2]) end
      if left or g[13] then precheck('HLEN', own[3]) end
      for i = 4, #own do precheck('LLEN', own[i]) end
    end
    if #entries > 0 then precheck('ZCARD', B .. 'entries') end
    if #messages > 0 then precheck('ZCARD', B .. 'messages') end
    precheck_activate(tenant)
  end
  for _, typ in ipairs(order) do
    precheck('HLEN', B .. 'load:' .. typ)
    has('types', typ)
    if not held then precheck_enqueue(typ, lane, tenant) end
    if #later[typ] > 0 then precheck_non_ready(tenant, typ) end
  end
  if scheduled then
    precheck('ZCARD', B .. 'scheduled')
    precheck('LLEN', B .. 'wake:dispatcher')
  elseif waiting > 0 then
    precheck('LLEN', B .. 'wake:fetcher')
  end
  if sealing and not dispatched then precheck_mark_dirty() end

  return reply, function()
    if not owned then call('SET', owner, tenant) end
    if fresh then
      call('ZADD', B .. 'groups', now, group)
      call('ZADD', B .. 'groups:' .. tenant, now, group)
      call('ZADD', B .. 'open', now, group)
      put('tenants', 0, tenant)
      if tags then tag(tenant, group, tags, now) end
      if left then call('UNLINK', unpack(own)) end
    end
    if #large > 0 then call('HSET', B .. 'payloads:' .. group, unpack(large)) end
    if #key_index > 0 then call('HSET', B .. 'keys:' .. group, unpack(key_index)) end
    for request, skipped in pairs(skips) do call('HSET', B .. 'keys:' .. group, '\31' .. request, skipped) end
    local function set(field, value) fields[#fields + 1], fields[#fields + 2] = field, tostring(value) end
    local types, known_types, new_types = g[9] or '', {}, {}
    for typ in string.gmatch(types, '[^|]+') do known_types[typ] = true end
    for _, typ in ipairs(order) do
      if not known_types[typ] then new_types[#new_types + 1] = typ end
    end
    if #new_types > 0 then
      types = (types == '' and '' or types .. '|') .. table.concat(new_types, '|')
      if fresh then set('types', types) else call('HSET', key, 'types', types) end
    end
    for _, typ in ipairs(order) do
      local q = queues[typ]
      if #q > 0 then call('RPUSH', B .. 'queue:' .. group .. ':' .. typ, unpack(q)) end
      if #later[typ] > 0 then add_non_ready(tenant, typ, later[typ]) end
      local load = loads[typ] or { 0, 0 }
      loads[typ] = { load[1] + #q, load[2] + #q + #later[typ] / 2 }
      put('types', now, typ)
    end
    if scheduled and any_accepted then
      call('ZADD', B .. 'scheduled', group_run_at, group)
      wake('dispatcher')
    end
    if n > 0 then call('SETRANGE', B .. 'states:' .. group, first * 2, table.concat(states)) end
    add(B .. 'tenant:' .. tenant, 'unfinished', n)
    if pieces then set('pieces', pieces) end
    if mode ~= '' and any_accepted then set('submitted', 1) end
    if sealing then set('sealed', 1) end
    if fresh then
      for field, value in pairs({ accepted = n, waiting = waiting, non_ready = n - waiting }) do
        if value > 0 then set(field, value) end
      end
      announce_new(group, fresh, dispatched)
    else
      add(key, 'accepted', n, 'waiting', waiting, 'non_ready', n - waiting)
    end
    if #fields > 0 then call('HSET', key, unpack(fields)) end
    if not fresh then rerank(group, types, factor) end
    for _, typ in ipairs(order) do
      if #queues[typ] > 0 and not held then enqueue(typ, lane, tenant, group, #queues[typ], now, factor, fresh) end
    end
    if not held then activate(tenant, waiting) end
    if #entries > 0 then call('ZADD', B .. 'entries', unpack(entries)) end
    if #messages > 0 then call('ZADD', B .. 'messages', unpack(messages)) end
    if sealing and not dispatched then mark_dirty(group) end
    if waiting > 0 and not held then wake('fetcher') end
  end
end

-- after returns the place behind the arguments of the group that stand behind ARGV[at].
local function after(at)
  local requests, per = tonumber(ARGV[at + 5]), ARGV[at + 4] == 'ready' and 1 or 4
  local to = at + 6 + tonumber(ARGV[at + 6])
  local jobs = 0
  for i = 1, requests do jobs = jobs + tonumber(ARGV[to + 2 * i]) end
  return to + 2 * requests + per * jobs
end
local replies, at = {}, 1
for i = 1, tonumber(ARGV[1]) do
  local reply, write = guarded(read_group, at)
  if write then write() end
  replies[i], at = reply, after(at)
end
for typ, load in pairs(loads) do add(B .. 'load:' .. typ, 'waiting', load[1], 'accepted', load[2]) end
return replies
