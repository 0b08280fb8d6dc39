-- promote: moves due non-ready jobs to their ready streams, with one permit each.
-- State: non-ready → ready
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  most       jobs     most jobs to promote
--   2  limiter    -        fixed, sliding or token
--   3  width      ms       length of a window
--   4  seed       -        8 random hex digits, for span ids
--   5  full_wait  ms       after this time promote looks again at a tenant whose due jobs found a
--                          full ready stream, or only permits that are kept for other jobs
--   6  cap        jobs     most undelivered jobs in a ready stream; suspects go beyond it
--   then for each type that a live worker serves:
--   +1  typ       -        the type
--   +2  cap       jobs     the cap of this type
-- Reply
--   {moved, skipped, wait, permits, denials, traced, now}
--     moved      jobs that are ready now
--     skipped    due jobs that the call has met and that can't become ready: their ready stream is
--                full, or a limit of their type or a bound of their tenant allows no more
--     wait       ms until another call can promote jobs; -1 = only paused tenants, or none, have
--                non-ready jobs
--     permits    {tenant, jobs, …}: the promoted jobs; with a limit, each spent a permit
--     denials    {tenant, reason, …}: see deny in parts/permits.lua
--     traced     {group, ordinal, tenant, trace, span id, since ms, now ms, new attempt, reason, …}
--     now        Redis time, µs
-- A due job that a limit of its type holds up, or its tenant's bound in a type without workers, gets a
-- later due time, within a second: so such jobs claim no permits and hide no other jobs, and are not
-- looked at in each call.
-- A suspect becomes ready although the stream is full: it runs in no slot, and processes that are
-- kept busy by other suspects leave the stream full. There are no more suspects than jobs that were
-- in flight in the dead workers.
-- Tenants are served in the order of their longest due job, so a tenant that got its share stands
-- behind those that got none. Due jobs of paused groups and types are suspended; those of a paused
-- tenant stay non-ready. After a resumption, each call first makes a batch of one tenant's
-- suspended jobs non-ready again.
-- Twice: the second call does not find the jobs, because they have left non-ready.
-- Out of memory: goes through.
-- Cost: some µs a job.
local most, seed, full_wait = tonumber(ARGV[1]), ARGV[4], tonumber(ARGV[5])
LIMITER, WIDTH = ARGV[2], tonumber(ARGV[3])
-- LOOK is the most due jobs that one call looks at, of all tenants. If the call ends there and has
-- found no job of the last tenant that may become ready, the next call begins behind those jobs of
-- this tenant that were looked at (field look of the tenant). So jobs of a type whose ready stream
-- is full don't hide the tenant's jobs of other types.
local LOOK = 1000
US = now_us()
local now = floor(US / 1000)
local moved, skipped, looked = 0, 0, 0
local pauses = any_paused()
local now_text = string.format('%.0f', now)
local status = {} -- by group: what group_status returns

-- group_status returns a table: gone, whether a group is deleted or cancelled; paused, which is
-- false if it is not paused; named, the set of ordinals that choose has put into one of its lists;
-- and pieces, the states that state_of has read.
local function group_status(group)
  local s = status[group]
  if s == nil then
    local g = call('HMGET', B .. 'group:' .. group, 'status', 'paused')
    s = { gone = not g[1] or g[1] == 'CANCELLED', paused = g[2], named = {}, pieces = {} }
    status[group] = s
  end
  return s
end

-- state_of returns the state of a job. It reads those of its neighbours too, because jobs that ended
-- together are often due together.
local PIECE = 256
local function state_of(j)
  local pieces, n = group_status(j.group).pieces, floor(j.ordinal / PIECE)
  if not pieces[n] then
    pieces[n] = call('GETRANGE', B .. 'states:' .. j.group, n * PIECE * 2, (n + 1) * PIECE * 2 - 1)
  end
  local at = (j.ordinal - n * PIECE) * 2
  return string.sub(pieces[n], at + 1, at + 2)
end

-- read is a quick parse: it reads only what promote needs, and leaves numbers that pass through as
-- text. counts are the fields from retries to the wait for the fair queue. at and trace_at are where
-- the queued blob and the trace begin.
local function read(blob)
  local group, typ, attempt, counts, losses, wr, wc, since, reason, at, ordinal, trace_at, trace = string.match(blob,
    '^([^|]*)|([^|]*)|(%d+)(|%d+|%d+|(%d+)|%d+|)(%d+)|(%d+)|(%d+)|(%a?)|()(%d+)|%d+|()([^|]*)|')
  if not group or #ordinal > 9 then return nil end -- more than states:GROUP can hold
  return {
    group = group, typ = typ, attempt = tonumber(attempt), counts = counts, losses = losses, wr = wr, wc = wc,
    since = since, reason = reason, at = at, ordinal = tonumber(ordinal), trace_at = trace_at, trace = trace,
  }
end

-- held_back says whether a job may not start because its group or its type is paused. It does not
-- look at the tenant.
local function held_back(j) return group_status(j.group).paused or (pauses and is_paused('y', j.typ)) end

-- bring_back makes a batch of a tenant's suspended jobs non-ready again, due at once, unless their
-- group or type is still paused. The last batch removes the tenant from the set resuming, and from
-- the set suspended if no job of it is left there.
local function bring_back(tenant)
  local suspended, key = B .. 'suspended:' .. tenant, B .. 'tenant:' .. tenant
  precheck('ZCARD', suspended, B .. 'non-ready', B .. 'non-ready:' .. tenant)
  precheck_activate(tenant)
  -- A job that is still paused for another reason gets a score later than the latest resumption, so
  -- that no later batch of this resumption reads it again.
  local upto = tonumber(call('HGET', B .. 'rate', 'resumed') or 0)
  local page = call('ZRANGEBYSCORE', suspended, '-inf', upto, 'WITHSCORES', 'LIMIT', 0, most)
  local back, gone, stay, wanted, congested = {}, {}, {}, 0, 0
  for i = 1, #page, 2 do
    local j = read(page[i])
    if j and not held_back(j) then
      back[#back + 1], back[#back + 2], gone[#gone + 1] = page[i + 1], page[i], page[i]
      if j.reason == 'R' then wanted = wanted + 1 end
      if is_congested(j.reason) then congested = congested + 1 end
    else
      stay[#stay + 1], stay[#stay + 2] = upto + 1, page[i]
    end
  end
  if #stay > 0 then call('ZADD', suspended, unpack(stay)) end
  if #gone > 0 then
    call('ZADD', B .. 'non-ready:' .. tenant, unpack(back))
    add(key, 'congested', congested)
    activate(tenant, wanted)
    if wanted > 0 then call('HSET', key, 'marker', '') end
    call('ZREM', suspended, unpack(gone))
  end
  local paused = call('HGET', key, 'paused')
  if not paused then reindex(tenant) end
  if #page / 2 < most then
    call('SREM', B .. 'resuming', tenant)
    if call('ZCARD', suspended) == 0 then call('SREM', B .. 'suspended', tenant) end
  end
end
precheck('SCARD', B .. 'resuming', B .. 'suspended')
local resuming = call('SRANDMEMBER', B .. 'resuming')
if resuming then
  allow_oom()
  bring_back(resuming)
end

local due = call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, 64)
-- By type: cap, as in ARGV; free, the free capacity of the ready stream; full, how many due jobs
-- found it full; asked, the field due of load:TYPE when the call began; est, the mean run time.
-- waits says whether it has waiting jobs.
local cap, free, full, asked, est, waits = {}, {}, {}, {}, {}, {}
local any_full = false -- whether a due job has found its stream full
for i = 7, #ARGV, 2 do cap[ARGV[i]] = tonumber(ARGV[i + 1]) end

-- free_capacity returns how many jobs of a type may become ready. It reads the stream once in a
-- call.
local function free_capacity(typ)
  if not free[typ] then
    local load = call('HMGET', B .. 'load:' .. typ, 'waiting', 'due', 'est')
    est[typ] = tonumber(load[3] or 1)
    local _, undelivered = stream_depth(B .. 'ready:' .. typ)
    free[typ], asked[typ] = (cap[typ] or tonumber(ARGV[6])) - undelivered, load[2] or ''
    -- If the type has waiting jobs, the other half of the capacity is left to them (see admit).
    waits[typ] = tonumber(load[1] or 0) > 0
    if waits[typ] then free[typ] = math.ceil(free[typ] / 2) end
  end
  return free[typ]
end

local g = { unset = true }
if #due > 0 then
  precheck('SCARD', B .. 'active')
  precheck('HLEN', B .. 'rate')
  precheck('LLEN', B .. 'quarantine')
  allow_oom()
  g = global()
  if g.limited then count_due(g, now) end
end
local limited, elastic = g.limited, g.elastic

-- limits_of returns the limits of a type that has some, and how many of its jobs they allow now
-- (may_start). later counts its jobs that have got a later due time, and each is the time in which one
-- of them may start, about.
local of_type = {}
local function limits_of(typ)
  if not g.types then return nil end
  if of_type[typ] == nil then
    local T = type_limit(typ, call('HGET', B .. 'rate', 'type:' .. typ)) or false
    of_type[typ] = T
    if T then
      precheck('HLEN', T.key)
      free_capacity(typ)
      T.may_start, T.later, T.each = room(T, call('XLEN', B .. 'ready:' .. typ)), 0, 1
      if waits[typ] then T.may_start = math.ceil(T.may_start / 2) end -- the other half is left to waiting jobs
      if T.places and not cap[typ] then T.may_start = 0 end
      if T.permits then T.each = WIDTH / math.max(1, T.permits) end
      if T.places then
        T.each = math.max(T.each, est[typ] / math.max(1, T.places))
      end
    end
  end
  return of_type[typ] or nil
end

-- blocked says whether a job lacks a permit or a place of its type, or the place of a tenant with a
-- bound and a worker. later_at returns its new due time.
local BLOCKED_MS = 20
local function blocked(typ, bounded)
  local T = limits_of(typ)
  return T and T.may_start <= 0 or bounded and not cap[typ]
end
local function later_at(typ)
  if not cap[typ] then return now + HELD_MS end -- it lacks a worker
  local T = limits_of(typ) or { later = 0, each = 1 }
  T.later = T.later + 1
  local at = now + BLOCKED_MS + floor(T.later * T.each)
  if T.left and T.left <= 0 and T.next_at then at = math.max(at, math.ceil(T.next_at / 1000)) end
  return math.min(at, now + HELD_MS)
end

-- look reads a tenant. In the result, limit, left and next_at are as in admit. can is how many of
-- its due jobs may become ready: with a global limit, up to half of the permits stay for waiting
-- jobs of the tenant that want them. borrows says that the permits are other tenants' unused ones.
-- offset is the field look. places and free are as in admit: how many entries its jobs have, and how
-- many more they may have; may is how many of these its due jobs may get. spare is the number of permits left that no tenant with waiting jobs may
-- claim; it is computed once in a call.
local F = LIMIT_FIELDS[LIMITER]
local spare
local function look(tenant)
  local key = B .. 'tenant:' .. tenant
  local h = call('HMGET', key, F[1], F[2], 'rps', 'weight', 'paused', 'active', 'look', 'in_flight', 'places', 'held')
  local t = { name = tenant, key = key, paused = h[5], offset = tonumber(h[7] or 0), can = most }
  if h[8] then
    t.places, t.held = tonumber(h[9] or 0), h[10]
    t.free = math.max(0, tonumber(h[8]) - t.places)
    -- As of the permits, up to half of the places stay for waiting jobs.
    t.may = t.free - math.max(0, math.min(tonumber(h[6] or 0) - 1, startable(g), floor(t.free / 2)))
  end
  if not limited and not h[3] then return t end
  t.left, t.next_at, t.limit = left[LIMITER](key, h[1], h[2], permits_of(g, h[3], h[4], false))
  t.can = t.left
  if limited then
    t.can = math.min(t.can, g.left)
    if t.can > 0 then
      t.can = t.can - math.max(0, math.min(tonumber(h[6] or 0) - 1, startable(g), t.can - half_for_due(t.can)))
    elseif g.left > 0 and elastic and not h[3] then
      spare = spare or g.left - reserved(g, nil, now)
      t.can = math.max(0, spare - reserved_due(g, now, tenant))
      t.borrows = true
    end
  end
  return t
end

-- found_full returns the type of a due job whose stream is full, as other jobs have found before; nil
-- if read must look at the job. Such jobs may be many, and each call meets them again. Those of a type
-- at its limit get a later due time.
local function found_full(blob)
  local group, typ, losses = string.match(blob, '^([^|]*)|([^|]*)|%d+|%d+|%d+|(%d+)|')
  local s = group and not pauses and status[group]
  return s and not s.gone and not s.paused and full[typ] and free[typ] <= 0 and tonumber(losses) == 0
    and not blocked(typ) and typ or nil
end

-- choose decides what becomes of a tenant's due jobs and moves none of them. It counts in looked,
-- skipped, denials, free and full, and it writes or deletes the tenant's field look. It returns
-- these lists, and a time (ms) before which it makes no sense to look at the tenant again, or nil:
--   going       {job, blob}: the jobs that become ready
--   paused      {job, blob}: the jobs that will be suspended
--   dropped     {job, blob}: elements that are not the job's present state, a second element of a
--               job in the lists above, jobs whose group is gone
--   unreadable  elements that are no jobs
--   later       {due, blob, …}: jobs that get a later due time
-- Due jobs that are in no list stay where they are.
local function choose(tenant, t)
  local set, not_before = B .. 'non-ready:' .. tenant, nil
  local c = { going = {}, dropped = {}, paused = {}, unreadable = {}, later = {} }
  local offset = t.offset
  repeat
    local page = call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', offset, most)
    offset = offset + #page
    for i, blob in ipairs(page) do
      if moved + #c.going >= most then return c, nil end
      if looked >= LOOK then
        if #c.going == 0 then call('HSET', t.key, 'look', offset - #page + i - 1 - #c.later / 2) end
        return c, not_before
      end
      looked = looked + 1
      local j, typ = nil, any_full and found_full(blob)
      if not typ then j = read(blob) end
      if not typ and not j then
        c.unreadable[#c.unreadable + 1] = blob
      else
        local s = j and group_status(j.group)
        if j and (s.gone or s.named[j.ordinal] or state_of(j) ~= 'N' .. mark(j.attempt)) then
          c.dropped[#c.dropped + 1] = { j, blob }
        elseif j and held_back(j) then
          c.paused[#c.paused + 1] = { j, blob }
          s.named[j.ordinal] = true
        elseif j and blocked(j.typ, t.free) then
          if not full[j.typ] then deny('', limits_of(j.typ) and limits_of(j.typ).left <= 0 and 'type' or 'in_flight') end
          skipped, full[j.typ] = skipped + 1, (full[j.typ] or 0) + 1
          c.later[#c.later + 1], c.later[#c.later + 2] = later_at(j.typ), blob
        elseif t.free and #c.going >= t.may and t.may < t.free then
          return c, now + full_wait
        elseif t.free and #c.going >= t.free then
          deny(tenant, 'in_flight')
          hold(t.key, t.held, '*')
          skipped = skipped + 1
          return c, now + HELD_MS
        elseif not j or free_capacity(j.typ) <= 0 and tonumber(j.losses) == 0 then
          typ, any_full = typ or j.typ, true
          skipped, not_before, full[typ] = skipped + 1, not_before or now + full_wait, (full[typ] or 0) + 1
        elseif #c.going >= t.can then
          -- A tenant that was denied only because the global limit is spent keeps its place in the
          -- order of tenants: its score does not change.
          local own = not limited or t.left - #c.going <= 0
          deny(tenant, (own or g.left > 0) and 'per_group' or 'global')
          if own and not t.borrows then return c, math.ceil(t.next_at / 1000) end
          return c, (limited and g.left > 0) and now + full_wait or nil
        else
          s.named[j.ordinal] = true
          c.going[#c.going + 1] = { j, blob }
          free[j.typ] = free_capacity(j.typ) - 1
          local T = limits_of(j.typ)
          if T then T.may_start = T.may_start - 1 end
        end
      end
    end
  until #page < most
  if t.offset > 0 then call('HDEL', t.key, 'look') end
  return c, not_before
end

-- to_ready adds one job to its ready stream under its next attempt. It adds a sampled job to traced.
local function to_ready(tenant, j, blob)
  local waited, attempt, wr, wc = math.max(0, now - j.since), j.attempt + 1, j.wr, j.wc
  if j.reason == 'R' then
    wr = wr + waited
  elseif j.reason == 'A' or j.reason == 'E' or j.reason == 'G' then
    wc = wc + waited
  end
  local queued = string.sub(blob, j.at)
  if j.trace ~= '' then
    local trace = new_span(seed, j.group, j.ordinal, tenant, j.trace, j.since, now, attempt, j.reason)
    queued = string.sub(blob, j.at, j.trace_at - 1) .. trace .. string.sub(blob, j.trace_at + #j.trace)
  end
  local head = j.group .. '|' .. j.typ .. '|' .. attempt .. j.counts .. wr .. '|' .. wc .. '|' .. now_text .. '||'
  call('XADD', B .. 'ready:' .. j.typ, '*', head, queued)
end

-- set_ready writes the states of a group's jobs that have become ready; attempts are their new ones,
-- by ordinal. Jobs that are close are written at once.
local function set_ready(group, ords, attempts)
  local new, span = {}, nil
  table.sort(ords)
  for i, ordinal in ipairs(ords) do new[i] = 'R' .. mark(attempts[ordinal]) end
  local lo, hi = ords[1], ords[#ords]
  if hi - lo < math.min(SPAN, 32 * (#ords - 1)) then
    span = call('GETRANGE', B .. 'states:' .. group, lo * 2, hi * 2 + 1)
  end
  store_states(group, ords, new, span)
end

-- promote_tenant carries out what choose has decided about a tenant's due jobs: it makes them ready
-- and spends their permits, suspends them, removes the dropped ones and quarantines the unreadable
-- ones. Then it writes the counts and the tenant's score in the sorted set non-ready.
local function promote_tenant(tenant, t)
  local set = B .. 'non-ready:' .. tenant
  precheck('ZCARD', B .. 'suspended:' .. tenant, set)
  local c, not_before = choose(tenant, t)
  local gone, load, ready, attempts, congested, wanted = c.unreadable, {}, {}, {}, 0, 0
  local function leave(j, blob)
    gone[#gone + 1] = blob
    if is_congested(j.reason) then congested = congested + 1 end
    if j.reason == 'R' then wanted = wanted + 1 end
  end
  local function unload(j) load[j.typ] = (load[j.typ] or 0) + 1 end
  for _, blob in ipairs(c.unreadable) do quarantine('non-ready:' .. tenant, blob) end
  for _, d in ipairs(c.dropped) do
    leave(d[1], d[2])
    unload(d[1])
  end
  for _, d in ipairs(c.paused) do
    leave(d[1], d[2])
    call('ZADD', B .. 'suspended:' .. tenant, now, d[2])
    call('SADD', B .. 'suspended', tenant)
  end
  for _, d in ipairs(c.going) do
    local j = d[1]
    if not ready[j.group] then ready[j.group], attempts[j.group] = {}, {} end
    table.insert(ready[j.group], j.ordinal)
    attempts[j.group][j.ordinal] = j.attempt + 1
    leave(j, d[2])
    unload(j)
    if of_type[j.typ] then spend_type(of_type[j.typ], 1) end
    to_ready(tenant, j, d[2])
  end
  if t.free and #c.going > 0 then call('HSET', t.key, 'places', t.places + #c.going) end
  if #c.later > 0 then call('ZADD', set, unpack(c.later)) end
  for group, ords in pairs(ready) do
    set_ready(group, ords, attempts[group])
    add(B .. 'group:' .. group, 'non_ready', -#ords, 'ready', #ords)
  end
  if #gone > 0 then
    for typ, n in pairs(load) do
      call('HINCRBY', B .. 'load:' .. typ, 'non_ready', -n)
      call('HDEL', B .. 'load:' .. typ, 'yield')
    end
    add(t.key, 'congested', -congested)
    activate(tenant, -wanted)
    if wanted > 0 then call('HDEL', t.key, 'marker') end
    call('ZREM', set, unpack(gone))
  end
  moved = moved + #c.going
  if spare then spare = spare - #c.going end
  spend_permits(g, t, #c.going)
  reindex(tenant, not_before)
end

for _, tenant in ipairs(due) do
  if g.unset or moved >= most or looked >= LOOK or (limited and g.left <= 0) then break end
  precheck('HLEN', B .. 'tenant:' .. tenant)
  local t = look(tenant)
  if t.paused then
    call('ZADD', B .. 'non-ready', FAR, tenant)
  else
    promote_tenant(tenant, t)
  end
end
-- The field due records when due jobs last found their stream full, and how many: admit then leaves
-- a part of the stream free for them for a while.
for typ, had in pairs(asked) do
  if full[typ] then call('HSET', B .. 'load:' .. typ, 'due', string.format('%.0f ', now) .. full[typ]) end
  if not full[typ] and had ~= '' then call('HDEL', B .. 'load:' .. typ, 'due') end
end

local first, wait = call('ZRANGE', B .. 'non-ready', 0, 0, 'WITHSCORES'), -1
if #first > 0 and tonumber(first[2]) < FAR then wait = math.max(0, tonumber(first[2]) - now) end
if wait == 0 and g.unset then wait = 1000 end
if wait == 0 and limited and g.left <= 0 then
  wait = math.max(1, math.ceil((g.next_at - US) / 1000))
  if #denials == 0 then deny(first[1], 'global') end
end
if call('SCARD', B .. 'resuming') > 0 then wait = 0 end
return { moved, skipped, wait, permits, denials, traced, US }
