-- admit: takes the next jobs of a type out of the fair queue.
-- State: waiting → ready; the first job of a tenant without a permit: waiting → non-ready
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists (README.md, rule 7)
-- ARGV
--   1   typ      -        the type
--   2   most     jobs     most jobs to admit
--   3   cap      jobs     most undelivered jobs in the ready stream
--   4   slots    workers  jobs that the workers can run at the same time; 0 = not known
--   5   ahead    jobs     jobs that the ready stream may hold beyond these; 0 = there are no
--                         workers
--   6   limiter  -        fixed, sliding or token
--   7   width    ms       length of a window
--   8   total    permits  permits in a window, of all partitions together; 0 = no limit
--   9   part     permits  this partition's quota until it is rebalanced
--   10  tag      -        name of the limit and of the number of partitions; '' = one partition
--   11  share    -        static or elastic
--   12  seed     -        8 random hex digits, for span ids
--   13  keep     ms       how long congestion statistics are kept
--   14  high     n        weight of the lane high
--   15  normal   n        weight of the lane normal
--   16  low      n        weight of the lane low
-- Reply
--   {state, moved, non_ready, wait, permits, denials, traced, now}
--     state      'OK'       jobs were admitted
--                'FULL'     the ready stream is full
--                'LIMITED'  the global limit has no permit left
--                'PAUSED'   the type is paused
--                'EMPTY'    no waiting job may run
--     moved      jobs that are ready now
--     non_ready  jobs that are non-ready now, as markers
--     wait       ms until another call can admit jobs; -1 = until the process is woken
--     permits    {tenant, permits, …} that were spent
--     denials    {tenant, reason, …}: per_group or global, as its own share or all permits are used
--                up
--     traced     {group, ordinal, tenant, trace, span id, accepted ms, now ms, ms waited for the
--                fair queue, ms waited for the rate limit, …}
--     now        Redis time, µs
-- A job is never between two locations: the script adds it to the new one, then removes it from the
-- old one.
-- Twice: the second call takes the next jobs.
-- Out of memory: goes through.
-- Cost: about 3 µs a job and some µs a tenant; O(log n) in tenants and groups.
typ, seed = ARGV[1], ARGV[12]
local most, cap, slots, ahead = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local total, elastic, keep = tonumber(ARGV[8]), ARGV[11] == 'elastic', tonumber(ARGV[13])
LIMITER, WIDTH = ARGV[6], tonumber(ARGV[7])
local weights = { high = tonumber(ARGV[14]), normal = tonumber(ARGV[15]), low = tonumber(ARGV[16]) }
local LANES = { 'high', 'normal', 'low' }
-- A tenant is given at most so many jobs in a row, or twice as many where that is over in a moment.
local PICK = 50
-- At most so many tenants are looked at in one call.
local LOOKS = 200
stream, fair, load_key = B .. 'ready:' .. typ, B .. 'fair:' .. typ, B .. 'load:' .. typ
local over, rate_limited = B .. 'over:' .. typ, B .. 'rate-limited:' .. typ
US = now_us()
now = floor(US / 1000)
local moved, non_ready, allowed, denied = 0, 0, {}, {}

if any_paused() and is_paused('y', typ) then return { 'PAUSED', 0, 0, -1, {}, {}, {}, US } end
local load = call('HMGET', load_key, 'full', 'est', 'due', 'quick', 'quick_at', 'yield')
local entries, undelivered = stream_depth(stream)
local free = cap - undelivered
if slots > 0 then free = math.min(free, slots + ahead - entries) end
local full_at = slots > 0 and slots + floor(ahead * 0.75) - (ahead < 2 and 1 or 0) or 1000000000
-- tell_full asks whoever starts or ends jobs of the type to wake the fetcher when there is room again.
local function tell_full(at)
  local text = floor(cap / 2) .. ' ' .. at
  if load[1] and string.match(load[1], '^%d+ %d+') == text then return end
  allow_oom()
  call('HSET', load_key, 'full', text .. string.format(' %.0f', now))
end
local room
do
  -- Parked jobs that are due have asked for a part of the stream, too (see promote): half at most. A single place is theirs every other time.
  local asked_at, asked = string.match(load[3] or '', '^(%d+) (%d+)$')
  local shared, yields = asked_at and math.abs(now - asked_at) < 200, false
  if shared then
    yields = free == 1 and load[6]
    free = yields and 0 or free - math.min(floor(free / 2), tonumber(asked))
  end
  -- A small top-up costs as much Redis time as a large one. While the workers have enough to read,
  -- the next top-up waits until a quarter of the buffer is free (half of it, when the number of
  -- workers is not known); the script that starts or ends jobs then wakes the fetcher. A stream
  -- that many due jobs share is topped up in small amounts: they would fill it in the meantime.
  local top_up = floor(ahead / (slots > 0 and 4 or 2))
  if shared and tonumber(asked) * 20 > ahead then top_up = floor(ahead / 20) end
  if free < top_up and undelivered >= math.max(slots, top_up) then free = 0 end
  room = math.min(most, free)
  if yields then
    precheck('LLEN', B .. 'wake:dispatcher')
    allow_oom()
    wake('dispatcher')
  end
  if room <= 0 then
    tell_full(full_at)
    return { 'FULL', 0, 0, -1, {}, {}, {}, US }
  end

  precheck('HLEN', fair, load_key, B .. 'rate')
  precheck('SCARD', B .. 'active')
  precheck('ZCARD', B .. 'non-ready', B .. 'priority:' .. typ)
  for _, lane in ipairs(LANES) do precheck('ZCARD', fair .. ':' .. lane, over .. ':' .. lane) end
  precheck('LLEN', B .. 'wake:dispatcher', B .. 'quarantine')
  allow_oom()
  if shared and free == 1 then call('HSET', load_key, 'yield', 1) end
  if load[1] then
    call('HDEL', load_key, 'full')
    load[1] = false
  end
end

do
  local factor = alpha()
  by_group = factor ~= nil -- in one order of priority, whoever's they are

  -- Tenants whose next permit has come take their places again.
  local function comeback(tenant)
    precheck('HLEN', B .. 'tenant:' .. tenant)
    for _, lane in ipairs(LANES) do
      local of = fair .. ':' .. lane .. ':' .. tenant
      if call('ZCARD', of) > 0 then
        enter_lane(typ, lane, tenant)
        if by_group then
          for _, group in ipairs(call('ZRANGE', of, 0, -1)) do call('ZADD', B .. 'priority:' .. typ, rank(group, factor), group) end
        end
      end
    end
    call('ZREM', rate_limited, tenant)
  end
  for _, tenant in ipairs(call('ZRANGEBYSCORE', rate_limited, '-inf', now, 'LIMIT', 0, 100)) do comeback(tenant) end
  -- Nobody waits for so long, unless the clock was set back.
  for _, tenant in ipairs(call('ZRANGEBYSCORE', rate_limited, now + 3 * WIDTH + 1000, '+inf', 'LIMIT', 0, 100)) do comeback(tenant) end
end

local g = global(total, tonumber(ARGV[9]), ARGV[10])
local limited = total > 0
local any_due = limited and count_due(g, now)
local lanes = call('HMGET', fair, 't:high', 't:normal', 't:low', 'v', 'gen')
local tag, waiting, lent = {}, {}, {}
for i, lane in ipairs(LANES) do
  tag[lane], waiting[lane] = tonumber(lanes[i] or 0), call('ZCARD', fair .. ':' .. lane)
  lent[lane] = call('ZCARD', over .. ':' .. lane)
end
local virtual = tonumber(lanes[4] or 0)
local state, wait = 'EMPTY', -1

-- quick is the run time of the quickest tenant's jobs lately (ms, see outcome). What a new tenant's jobs take is not known; they are taken for quick ones
-- and charged for when they have ended.
local quick = tonumber(load[4] or nil)
if quick and math.abs(now - tonumber(load[5] or 0)) > QUICK_MS then quick = nil end

local look
do
  -- look reads what counts for a tenant: its own limit or share, what is left of it, and the part of that which its due jobs may claim.
  local F, claims = LIMIT_FIELDS[LIMITER], {}
  function look(tenant)
    local key = B .. 'tenant:' .. tenant
    local h = call('HMGET', key, F[1], F[2], 'rps', 'weight', 'paused', 'est:' .. typ, 'owe:' .. typ, 'rs', 'rd', 'marker')
    local t = { name = tenant, key = key, rps = h[3], weight = tonumber(h[4] or 1), paused = h[5], owe = tonumber(h[7] or 0), rs = tonumber(h[8] or 0), rd = tonumber(h[9] or 0), marker = h[10] }
    t.est = tonumber(h[6] or nil)
    t.cost = math.max(1, t.est or quick or tonumber(load[2] or 1)) / t.weight
    t.bound = rate_since(t.rs, t.rd, now)
    local all = limited and rate_since(g.rs, g.rd, now)
    if all and (not t.bound or all < t.bound) then t.bound = all end
    if not limited and not t.rps then return t end
    precheck('ZCARD', B .. 'non-ready:' .. tenant) -- its marker goes there
    precheck('HLEN', B .. 'congestion:' .. tenant)
    local permits = permits_of(g, limited, t.rps, h[4], by_group and elastic)
    t.left, t.next_at, t.limit = left[LIMITER](key, h[1], h[2], permits)
    t.can = limited and math.min(t.left, g.left) or t.left
    if any_due and t.can > 0 then
      claims[tenant] = claims[tenant] or math.min(overdue(tenant, now), half_for_due(t.can))
      t.can = math.max(0, t.can - claims[tenant])
    end
    return t
  end
end

local function gone_from(lane, set)
  if set == 'over' then lent[lane] = lent[lane] - 1 else waiting[lane] = waiting[lane] - 1 end
end

-- dismiss lets a tenant leave all lanes of the type.
local function dismiss(tenant)
  for _, l in ipairs(LANES) do
    local own, borrowed = call('ZSCORE', fair .. ':' .. l, tenant), call('ZSCORE', over .. ':' .. l, tenant)
    if own or borrowed then
      leave_lane(typ, l, tenant, own or borrowed)
      gone_from(l, own and 'fair' or 'over')
    end
  end
end

-- rate_limit_tenant lets a tenant wait as a whole for its next permit; its head job moves, as the marker of its next start.
local function rate_limit_tenant(t, lane, group, n)
  if t.left > 0 then
    -- It has permits, but they are left to jobs that are due.
    call('ZADD', rate_limited, now + 2, t.name)
    dismiss(t.name)
    if by_group then call('ZREM', B .. 'priority:' .. typ, group) end
    return
  end
  local due = math.ceil(t.next_at / 1000)
  denied[#denied + 1] = t.name
  denied[#denied + 1] = 'per_group'
  local of = fair .. ':' .. lane .. ':' .. t.name
  if t.marker or call('ZSCORE', rate_limited, t.name) then -- its former head has not got a permit yet
    rate_bound(t.key, t.rs, t.rd, now)
    call('ZADD', rate_limited, due, t.name)
  else
    local went, gone = take(group, 1, to_non_ready(group, t.name, t.bound or now, due))
    rate_bound(t.key, t.rs, t.rd, now)
    settle(group, of, 'non_ready', went, gone, n)
    call('ZADD', rate_limited, due, t.name)
    if went > 0 then
      call('HINCRBY', B .. 'group:' .. group, 'throttles', went)
      call('HINCRBY', t.key, 'congested', went)
      call('HSET', t.key, 'marker', typ)
      call('HINCRBY', B .. 'congestion:' .. t.name, 'throttles', went)
      call('HSET', B .. 'congestion:' .. t.name, 'last', now)
      call('PEXPIRE', B .. 'congestion:' .. t.name, keep)
    end
    if gone > went then activate(t.name, went - gone) end
    non_ready = non_ready + went
  end
  dismiss(t.name)
  if by_group then call('ZREM', B .. 'priority:' .. typ, group) end
end

-- give moves k jobs of a tenant's group to the ready stream and charges for them, in ms of work.
local function give(t, lane, group, n, k)
  if limited then k = math.min(k, g.left) end
  local of = fair .. ':' .. lane .. ':' .. t.name
  local went, gone = take(group, k, to_ready(group, t.name, t.bound))
  local empty = settle(group, of, 'ready', went, gone, n)
  activate(t.name, -gone)
  if went > 0 and t.limit then spend[LIMITER](t.key, t.limit, went) end
  if went > 0 and limited then
    g.left = g.left - went
    spend[LIMITER](B .. 'rate', g.state, went)
  end
  moved = moved + went
  allowed[t.name] = (allowed[t.name] or 0) + went
  return went, empty
end

-- charge moves the tags on. Start-time fair queueing (Goyal, Vin, Cheng 1996), for lanes and for the tenants of a lane. What a tenant owes
-- is the difference between what its jobs were charged for and the time that they really took (see outcome).
local function charge(t, lane, start, went, empty, from, to)
  local cost = went * t.cost + t.owe / t.weight
  if t.owe ~= 0 then call('HSET', t.key, 'owe:' .. typ, math.min(0, cost) * t.weight) end
  cost = math.max(0, cost)
  virtual = math.max(tag[lane], virtual)
  tag[lane] = virtual + went * t.cost * t.weight / weights[lane]
  call('HSET', fair, 'v', virtual, 't:' .. lane, tag[lane], 'v:' .. lane, start, 'gen', lanes[5] or now)
  if empty then
    leave_lane(typ, lane, t.name, start + cost)
    gone_from(lane, from)
  else
    call('ZADD', (to == 'over' and over or fair) .. ':' .. lane, start + cost, t.name)
    if from ~= to then
      call('ZREM', (from == 'over' and over or fair) .. ':' .. lane, t.name)
      waiting[lane] = waiting[lane] + (to == 'fair' and 1 or -1)
      lent[lane] = lent[lane] + (to == 'fair' and -1 or 1)
    end
  end
end

local quantum, many
do
  -- quantum is how many jobs one pick takes: a fair part of the room, and enough at a time for its cost where there is much room; more, where the workers are
  -- through with it in a millisecond.
  local in_a_ms = floor(slots / math.max(0.001, tonumber(load[2] or 1)))
  local few = math.max(20, math.min(2 * PICK, in_a_ms))
  many = math.max(PICK, math.min(2 * PICK, in_a_ms))
  function quantum(tenants)
    return math.min(room - moved, many, math.max(math.ceil(room / math.max(1, tenants)), math.min(few, floor(room / 2.5)), 1))
  end
end

local finish
do
  -- The last few jobs of a group go together, also beyond the room, as long as the workers need little time for them: a small group is not torn into pieces that
  -- wait in turn with a large one's. The tag pays for it. A new tenant's jobs count as those of the others, and it gets one for each worker at least.
  local FEW, FEW_MS = 20, 30
  function finish(t, n)
    if n > FEW or slots == 0 then return 0 end
    n = math.min(n, cap - undelivered - moved)
    if n * (t.est or tonumber(load[2] or 1)) <= FEW_MS * slots then return n end
    return t.est and 0 or math.min(n, slots)
  end
end

local room_for, kept
do
  -- A job that runs can't be interrupted. So where others have jobs that are over quickly, long ones leave three in ten workers to these; where nobody
  -- has had any lately, they may take all.
  local LONG_MS, LONG = 100, 10
  kept = math.max(0, math.min(math.ceil(slots * 0.3), slots - 1))
  function room_for(t)
    if slots == 0 or not t.est or not quick or t.est < LONG_MS or t.est < LONG * quick then return many end
    return slots - kept - entries - moved
  end
end

-- next_lane is the one whose turn it is among those with tenants in a set.
local function next_lane(count)
  local lane
  for _, l in ipairs(LANES) do
    if count[l] > 0 and (not lane or math.max(tag[l], virtual) < math.max(tag[lane], virtual)) then lane = l end
  end
  return lane
end

local function exhausted(tenant)
  denied[#denied + 1] = tenant
  denied[#denied + 1] = 'global'
  rate_bound(B .. 'rate', g.rs, g.rd, now)
  if moved > 0 then -- they are spent by now
    local h = call('HMGET', B .. 'rate', LIMIT_FIELDS[LIMITER][1], LIMIT_FIELDS[LIMITER][2])
    local _, next_at = left[LIMITER](B .. 'rate', h[1], h[2], g.permits)
    g.next_at = next_at
  end
  state, wait = 'LIMITED', math.max(0, math.ceil((g.next_at - US) / 1000))
end

-- by_fairness serves lanes and tenants, those first that have permits of their own. Tenants that have used theirs stand by in `over`.
local function by_fairness()
  -- At the start of a window those that have borrowed have permits of their own again.
  local function fresh(lane)
    if lent[lane] == 0 then return nil end
    local first = call('ZRANGE', over .. ':' .. lane, 0, 0, 'WITHSCORES')
    if #first == 0 then
      lent[lane] = 0
      return nil
    end
    local t = look(first[1])
    if not t.can or t.can > 0 or t.paused then return t, tonumber(first[2]) end
    return nil
  end
  local back, back_start, asked = {}, {}, {}
  -- A tenant with long jobs for which no worker may be taken now is passed over, and owed: whoever is further ahead than two of its jobs waits for it.
  local passed, owed = { high = 0, normal = 0, low = 0 }, nil
  local function await_owed()
    if moved > 0 then return end
    full_at, state = slots - kept - 1, 'FULL'
    tell_full(full_at)
  end
  local looks = 0
  while moved < room do
    looks = looks + 1
    if looks > LOOKS then
      state = 'OK'
      return false
    end
    local have = {}
    for _, l in ipairs(LANES) do
      if not asked[l] then
        back[l], back_start[l] = fresh(l)
        asked[l] = true
      end
      have[l] = waiting[l] - passed[l] + (back[l] and 1 or 0)
    end
    local lane = next_lane(have)
    if not lane then
      if not owed then return true end
      await_owed()
      return false
    end
    local first = call('ZRANGE', fair .. ':' .. lane, passed[lane], passed[lane], 'WITHSCORES')
    local t, start, from = nil, tonumber(first[2]), 'fair'
    if back[lane] and (not start or back_start[lane] <= start) then
      t, start, from = back[lane], back_start[lane], 'over'
      asked[lane] = nil
    end
    if limited and g.left <= 0 then
      exhausted(t and t.name or first[1])
      return false
    end
    t = t or look(first[1])
    local group, n
    if not t.paused then group, n = next_group(lane, t.name) end
    if t.paused then
      dismiss(t.name)
    elseif not group then
      leave_lane(typ, lane, t.name, start)
      gone_from(lane, from)
    elseif owed and lane == owed.lane and start > owed.start + 2 * owed.cost then
      await_owed()
      return false
    elseif room_for(t) <= 0 then
      if from == 'over' then
        back[lane], asked[lane] = nil, true
      else
        passed[lane] = passed[lane] + 1
      end
      if not owed then owed = { lane = lane, start = start, cost = t.cost } end
    elseif not t.can or t.can > 0 then
      local k = math.min(math.max(quantum(waiting[lane]), finish(t, n)), t.can or many, room_for(t))
      local went, empty = give(t, lane, group, n, k)
      charge(t, lane, start, went, empty, from, 'fair')
      for _, l in ipairs(LANES) do -- what was read of it elsewhere is out of date
        if back[l] and back[l].name == t.name then asked[l] = nil end
      end
    elseif elastic and not t.rps and t.left <= 0 then
      call('ZADD', over .. ':' .. lane, start, t.name)
      call('ZREM', fair .. ':' .. lane, t.name)
      waiting[lane], lent[lane] = waiting[lane] - 1, lent[lane] + 1
    else
      rate_limit_tenant(t, lane, group, n)
    end
  end
  return false
end

-- lend gives away what nobody else claims, by the same turns.
local function lend()
  local spare = g.left - reserved(g, typ, now) - reserved_due(g, now)
  while moved < room do
    local lane = next_lane(lent)
    if not lane then return end
    local first = call('ZRANGE', over .. ':' .. lane, 0, 0, 'WITHSCORES')
    if spare <= 0 then
      if g.left <= 0 then exhausted(first[1]) else
        denied[#denied + 1] = first[1]
        denied[#denied + 1] = 'per_group'
        rate_bound(B .. 'rate', g.rs, g.rd, now)
        state, wait = 'LIMITED', math.max(1, math.min(2, math.ceil((g.next_at - US) / 1000)))
      end
      return
    end
    local t, start = look(first[1]), tonumber(first[2])
    local group, n
    if not t.paused then group, n = next_group(lane, t.name) end
    if t.paused then
      dismiss(t.name)
    elseif not group then
      leave_lane(typ, lane, t.name, start)
      gone_from(lane, 'over')
    elseif t.rps then -- it has got a limit of its own meanwhile
      rate_limit_tenant(t, lane, group, n)
    else
      local went, empty = give(t, lane, group, n, math.min(quantum(lent[lane]), spare))
      spare = spare - went
      charge(t, lane, start, went, empty, 'over', 'over')
    end
  end
end

-- by_priority serves groups in the order of the user's formula.
local function by_priority()
  while moved < room do
    local first = call('ZREVRANGE', B .. 'priority:' .. typ, 0, 0)
    if #first == 0 then return end
    local group = first[1]
    local h = call('HMGET', B .. 'group:' .. group, 'tenant', 'lane')
    local tenant, lane = h[1], h[2]
    if tenant then precheck('ZCARD', fair .. ':' .. lane .. ':' .. tenant) end
    local n = call('LLEN', B .. 'queue:' .. group .. ':' .. typ)
    if not tenant or n == 0 then
      call('ZREM', B .. 'priority:' .. typ, group)
    elseif limited and g.left <= 0 then
      return exhausted(tenant)
    else
      local t = look(tenant)
      if t.paused then
        call('ZREM', B .. 'priority:' .. typ, group)
      elseif not t.can or t.can > 0 then
        local _, empty = give(t, lane, group, n, math.min(room - moved, PICK, t.can or PICK))
        local own = empty and in_lane(typ, lane, tenant)
        if own then leave_lane(typ, lane, tenant, own) end
      else
        rate_limit_tenant(t, lane, group, n)
      end
    end
  end
end

if by_group then
  by_priority()
elseif by_fairness() and elastic and limited then
  lend()
end

if moved > 0 then
  if state == 'EMPTY' or state == 'FULL' then state = 'OK' end
  -- The stream is as long as it may be.
  if moved >= free then
    tell_full(full_at)
    if state == 'OK' then state = 'FULL' end
  end
end
if state == 'EMPTY' then
  local next_permit = call('ZRANGE', rate_limited, 0, 0, 'WITHSCORES')
  if #next_permit > 0 then wait = math.max(0, tonumber(next_permit[2]) - now) end
end
local flat = {}
for tenant, n in pairs(allowed) do
  flat[#flat + 1] = tenant
  flat[#flat + 1] = n
end
return { state, moved, non_ready, wait, flat, denied, traced, US }
