-- admit: takes the next jobs of a type out of the fair queue.
-- State: waiting → ready; the marker of a rate-limited tenant: waiting → non-ready
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1   typ      -        the type
--   2   most     jobs     most jobs to admit; a few more if they complete a small group
--   3   cap      jobs     most undelivered jobs in the ready stream
--   4   slots    workers  jobs that the workers can run at the same time; 0 = not known
--   5   ahead    jobs     entries that the ready stream may have beyond slots; 0 = there are no
--                         workers
--   6   served   0|1      1 = a live worker serves the type. Otherwise no job becomes ready that would
--                         hold a place of a bound
--   7   limiter  -        fixed, sliding or token
--   8   width    ms       length of a window
--   9   seed     -        8 random hex digits, for span ids
--   10  keep     ms       how long congestion statistics are kept after a tenant's last event
--   11  high     n        weight of the lane high
--   12  normal   n        weight of the lane normal
--   13  low      n        weight of the lane low
-- Reply
--   {state, moved, non_ready, wait, permits, denials, traced, now}
--     state      'OK'       jobs were admitted, or the call has looked at as much as it may
--                'FULL'     the ready stream takes no more jobs now: it is full, or what is free is
--                           little or kept for others, or the type has as many entries as it may;
--                           jobs may have been admitted before
--                'LIMITED'  no permit of the global limit or of the type's is left, or others may
--                           claim those that are; jobs may have been admitted before
--                'UNSET'    the partition does not know its limits: quota has not been called
--                'PAUSED'   the type is paused
--                'EMPTY'    no waiting job may run now
--     moved      jobs that are ready now
--     non_ready  jobs that are non-ready now, as markers
--     wait       ms until another call can admit jobs; -1 = until the process is woken; not set
--                (-1) with OK: another call may admit jobs at once
--     permits    {tenant, jobs, …}: the admitted jobs; with a limit, each spent a permit
--     denials    {tenant, reason, …}: see deny in parts/permits.lua. Of a type's limits, the tenant
--                is ''
--     traced     {group, ordinal, tenant, trace, span id, now ms, ms waited for the fair queue, ms
--                waited for the rate limit, …}
--     now        Redis time, µs
-- Tenants whose next permit has come return to the fair queue first.
-- A job is never between two locations: the script adds it to the new one, then removes it from the
-- old one.
-- Twice: the second call takes the next jobs.
-- Out of memory: goes through.
-- Cost: about 3 µs a job and some µs a tenant; O(log n) in tenants and groups.
typ, seed = ARGV[1], ARGV[9]
local most, cap, slots, ahead = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local served, keep = ARGV[6] == '1', tonumber(ARGV[10])
LIMITER, WIDTH = ARGV[7], tonumber(ARGV[8])
local weights = { high = tonumber(ARGV[11]), normal = tonumber(ARGV[12]), low = tonumber(ARGV[13]) }
local PICK = 50 -- most jobs of a tenant in a row; up to 100 if the workers run so many within 1 ms
local LOOKS = 200 -- most turns of by_fairness or by_priority; a turn serves one tenant or group
stream, fair, load_key = B .. 'ready:' .. typ, B .. 'fair:' .. typ, B .. 'load:' .. typ
local over, rate_limited = B .. 'over:' .. typ, B .. 'rate-limited:' .. typ
US = now_us()
now = floor(US / 1000)
local moved, non_ready = 0, 0

if any_paused() and is_paused('y', typ) then return { 'PAUSED', 0, 0, -1, {}, {}, {}, US } end
local load = call('HMGET', load_key, 'full', 'est', 'due', 'quick', 'quick_at', 'yield')
local entries, undelivered = stream_depth(stream)
local free = cap - undelivered
if slots > 0 then free = math.min(free, slots + ahead - entries) end
local full_at = slots > 0 and slots + floor(ahead * 0.75) - (ahead < 2 and 1 or 0) or 1000000000
-- store_full stores in the field full of load:TYPE that the ready stream is full, and since when.
-- The field also says when refill wakes the fetcher: when the stream has at most `entries_at`
-- entries, and at most half of cap undelivered.
local function store_full(entries_at)
  local text = floor(cap / 2) .. ' ' .. entries_at
  if load[1] and string.match(load[1], '^%d+ %d+') == text then return end
  allow_oom()
  call('HSET', load_key, 'full', text .. string.format(' %.0f', now))
end
local capacity -- most jobs that this call admits; finish may add a few
local g -- what global returned
local T -- the type's limits; nil = it has none
local may_start = math.huge -- how many jobs they allow now
do
  -- If due jobs found the stream full in the last 200 ms (see promote), admit leaves them up to
  -- half of its free capacity. If there is space for one job only, the sides get it in turn.
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
  capacity = math.min(most, free)
  if yields then
    precheck('LLEN', B .. 'wake:dispatcher')
    allow_oom()
    wake('dispatcher')
  end
  if capacity <= 0 then
    store_full(full_at)
    return { 'FULL', 0, 0, -1, {}, {}, {}, US }
  end

  g = global(typ)
  if g.unset then return { 'UNSET', 0, 0, -1, {}, {}, {}, US } end
  T = type_limit(typ, g.spec)
  if T then
    if T.places and not served then return { 'EMPTY', 0, 0, -1, {}, {}, {}, US } end
    if T.places then full_at = math.min(full_at, T.places - 1) end
    may_start = room(T, entries)
    -- As of the stream, due jobs get up to half of what the type's limits allow; the one that is left
    -- goes to the sides in turn.
    -- A job that lacks a place asks again within HELD_MS; one that lacks a permit may meet a window
    -- without any.
    local fresh = 2 * HELD_MS + (T.permits and WIDTH or 0)
    local due = asked_at and math.abs(now - asked_at) < fresh and tonumber(asked) or 0
    if may_start == 1 and due > 0 then
      if load[6] then may_start = 0 else yields = 'next' end
    end
    may_start = may_start - math.min(floor(may_start / 2), due)
    capacity = math.min(capacity, may_start)
    if may_start <= 0 and T.left <= 0 then
      allow_oom()
      rate_bound(T.key, T.rd, now)
      local wait = math.max(0, math.ceil((T.next_at - US) / 1000))
      return { 'LIMITED', 0, 0, wait, {}, { '', 'type' }, {}, US }
    elseif may_start <= 0 then
      store_full(full_at)
      return { 'FULL', 0, 0, -1, {}, { '', 'in_flight' }, {}, US }
    end
  end
  precheck('HLEN', fair, load_key, B .. 'rate')
  precheck('SCARD', B .. 'active')
  precheck('ZCARD', B .. 'non-ready')
  for _, lane in ipairs(LANES) do
    precheck('ZCARD', fair .. ':' .. lane, over .. ':' .. lane, B .. 'priority:' .. typ .. ':' .. lane)
  end
  precheck('LLEN', B .. 'wake:dispatcher', B .. 'quarantine')
  allow_oom()
  if shared and free == 1 or yields == 'next' then call('HSET', load_key, 'yield', 1) end
  if load[1] then
    call('HDEL', load_key, 'full')
    load[1] = false
  end
end

do
  local factor = alpha()
  by_group = factor ~= nil -- priority orders the groups of a lane

  -- end_rate_limit ends the rate limitation of a tenant: it enters its lanes again. admit calls it
  -- for tenants whose next permit has come.
  local function end_rate_limit(tenant)
    precheck('HLEN', B .. 'tenant:' .. tenant)
    enter_lanes(typ, tenant, factor, true)
    call('ZREM', rate_limited, tenant)
  end
  for _, tenant in ipairs(call('ZRANGEBYSCORE', rate_limited, '-inf', now, 'LIMIT', 0, 100)) do
    end_rate_limit(tenant)
  end
  -- A wait of more than three windows and 1 s ends now, too: the clock was set back since, or the
  -- window was longer then.
  for _, tenant in ipairs(call('ZRANGEBYSCORE', rate_limited, now + 3 * WIDTH + 1000, '+inf', 'LIMIT', 0, 100)) do
    end_rate_limit(tenant)
  end
end

local limited, elastic = g.limited, g.elastic
local any_due = limited and count_due(g, now)
local lanes = call('HMGET', fair, 't:high', 't:normal', 't:low', 'v', 'gen')
local gen, tags = lanes[5], {} -- tags: fields of fair:TYPE to write at the end
-- Each table is by lane. tag: its start tag; entitled: how many tenants are in fair:TYPE:LANE, with
-- permits of their own; borrowing: how many are in over:TYPE:LANE.
local tag, entitled, borrowing = {}, {}, {}
for i, lane in ipairs(LANES) do
  tag[lane], entitled[lane] = tonumber(lanes[i] or 0), call('ZCARD', fair .. ':' .. lane)
  borrowing[lane] = call('ZCARD', over .. ':' .. lane)
end
local virtual = tonumber(lanes[4] or 0)
local state, wait = 'EMPTY', -1

-- quick is about the lowest mean run time (ms) that a tenant's jobs of this type had in a batch of
-- outcomes in the last QUICK_MS (see outcome); nil = there is none. The run time of a new tenant's
-- jobs is not known: it is taken as quick, and the tenant is charged for the difference when the
-- jobs have ended.
local quick = tonumber(load[4] or nil)
if quick and math.abs(now - tonumber(load[5] or 0)) > QUICK_MS then quick = nil end

local look
do
  -- look reads a tenant. The fields of the result (besides name, key, and rs and rd of its hash):
  --   rps, weight, paused, marker  as in its hash; weight is 1 if it has none
  --   est          mean run time of its jobs of the type, ms; nil = not known
  --   owe          run time that it was not charged for yet, ms; negative: it was charged too much
  --   cost         run time of a job (ms, at least 1) divided by the weight: what a job adds to
  --                the tenant's start tag
  --   bound        since when permits are denied to it or to all, ms; nil = they are not
  --   limit        the limiter's state for spend (see limiters); nil = no limit
  --   left         permits that are left of its own limit or share; with by_group and elastic
  --                shares, of all that the partition has, instead of a share
  --   next_at      time of its next permit, µs
  --   places       entries that its jobs have, if it has a bound; free: how many more they may have
  --   can          permits that its waiting jobs may spend now; nil = no limit. With a global
  --                limit: not more than all tenants have left, and without those that its due jobs
  --                may claim
  local F, claims = LIMIT_FIELDS[LIMITER], {}
  function look(tenant)
    local key = B .. 'tenant:' .. tenant
    local h = call('HMGET', key, F[1], F[2], 'rps', 'weight', 'paused', 'est:' .. typ, 'owe:' .. typ, 'rs', 'rd',
      'marker', 'in_flight', 'places', 'held')
    local t = {
      name = tenant, key = key, rps = h[3], weight = tonumber(h[4] or 1), paused = h[5],
      owe = tonumber(h[7] or 0), rs = tonumber(h[8] or 0), rd = tonumber(h[9] or 0), marker = h[10],
    }
    if h[11] then
      t.places, t.held = tonumber(h[12] or 0), h[13]
      t.free = served and math.max(0, tonumber(h[11]) - t.places) or 0
      -- Its due jobs get up to half of what is free; of a single place in every other second.
      if t.free > 0 and call('ZCARD', B .. 'non-ready:' .. tenant) > 0 then
        local due = call('ZCOUNT', B .. 'non-ready:' .. tenant, '-inf', now)
        t.free = t.free - math.min(due, floor((t.free + floor(now / 1000) % 2) / 2))
      end
    end
    t.est = tonumber(h[6] or nil)
    t.cost = math.max(1, t.est or quick or tonumber(load[2] or 1)) / t.weight
    t.bound = rate_since(t.rs, t.rd, now)
    for _, of in ipairs({ limited and g, T }) do
      local all = of and rate_since(of.rs, of.rd, now)
      if all and (not t.bound or all < t.bound) then t.bound = all end
    end
    if not limited and not t.rps then return t end
    precheck('ZCARD', B .. 'non-ready:' .. tenant) -- its marker goes there
    precheck('HLEN', B .. 'congestion:' .. tenant)
    local allowed = permits_of(g, t.rps, h[4], by_group and elastic)
    t.left, t.next_at, t.limit = left[LIMITER](key, h[1], h[2], allowed)
    t.can = limited and math.min(t.left, g.left) or t.left
    if any_due and t.can > 0 then
      claims[tenant] = claims[tenant] or math.min(overdue(tenant, now), half_for_due(t.can))
      t.can = math.max(0, t.can - claims[tenant])
    end
    return t
  end
end

-- count_left subtracts one from the number of tenants in a set (fair or over) of a lane.
local function count_left(lane, set)
  if set == 'over' then borrowing[lane] = borrowing[lane] - 1 else entitled[lane] = entitled[lane] - 1 end
end

-- leave_lanes removes a tenant from all lanes of the type, and stores its start tags.
local function leave_lanes(tenant)
  for _, l in ipairs(LANES) do
    local own = call('ZSCORE', fair .. ':' .. l, tenant)
    local borrowed = call('ZSCORE', over .. ':' .. l, tenant)
    if own or borrowed then
      leave_lane(typ, l, tenant, own or borrowed, gen)
      count_left(l, own and 'fair' or 'over')
    end
  end
end

-- at_bound says whether a tenant has as many jobs in flight as it may. It then leaves all lanes until
-- one of them ends, or for HELD_MS.
local function at_bound(t)
  if not t.free or t.free > 0 then return false end
  deny(t.name, 'in_flight')
  hold(t.key, t.held, typ)
  call('ZADD', rate_limited, now + HELD_MS, t.name)
  leave_lanes(t.name)
  return true
end

-- group_of returns the next group of a tenant that is in the set (fair or over) of a lane, and the
-- number of the group's waiting jobs. A tenant that is paused or at its bound leaves all lanes, one
-- without waiting jobs leaves this one; then group_of returns nil.
local function group_of(t, lane, start, set)
  if t.paused then return leave_lanes(t.name) end
  if at_bound(t) then return nil end
  local group, n = next_group(lane, t.name)
  if not group then
    leave_lane(typ, lane, t.name, start, gen)
    count_left(lane, set)
  end
  return group, n
end

-- rate_limit_tenant removes a tenant from its lanes until its next permit. The first waiting job of
-- group becomes its marker (non-ready, due at that time), unless the tenant has one. If the tenant
-- has permits that its due jobs may claim, it leaves its lanes for 2 ms, without a marker.
local function rate_limit_tenant(t, lane, group, n)
  local due = now + 2
  if t.left <= 0 then
    due = math.ceil(t.next_at / 1000)
    deny(t.name, 'per_group')
    -- A tenant that is still rate-limited has a marker, which has no permit yet.
    if not t.marker and not call('ZSCORE', rate_limited, t.name) then
      local went, gone = take(group, 1, to_non_ready(group, t.name, t.bound or now, due))
      count_taken(group, lane, t.name, 'non_ready', went, gone, n)
      if went > 0 then
        call('HINCRBY', B .. 'group:' .. group, 'throttles', went)
        call('HINCRBY', load_key, 'throttled', went)
        call('HINCRBY', t.key, 'congested', went)
        call('HSET', t.key, 'marker', typ)
        call('HINCRBY', B .. 'congestion:' .. t.name, 'throttles', went)
        call('HSET', B .. 'congestion:' .. t.name, 'last', now)
        call('PEXPIRE', B .. 'congestion:' .. t.name, keep)
      end
      if gone > went then activate(t.name, went - gone, t.weight) end
      non_ready = non_ready + went
    end
    rate_bound(t.key, t.rd, now)
  end
  call('ZADD', rate_limited, due, t.name)
  leave_lanes(t.name)
  if by_group then call('ZREM', B .. 'priority:' .. typ .. ':' .. lane, group) end
end

-- admit_jobs moves up to k jobs of a tenant's group to the ready stream and spends their permits.
-- It returns how many it moved, and whether no group of the tenant is left in the lane; the caller
-- then removes the tenant from the lane.
local function admit_jobs(t, lane, group, n, k)
  if limited then k = math.min(k, g.left) end
  if t.free then k = math.min(k, t.free) end
  local went, gone = take(group, k, to_ready(group, t.name, t.bound))
  local empty = count_taken(group, lane, t.name, 'ready', went, gone, n)
  activate(t.name, -gone, t.weight)
  spend_permits(g, t, went)
  spend_type(T, went)
  if t.free then call('HSET', t.key, 'places', t.places + went) end
  moved = moved + went
  return went, empty
end

-- charge_lane adds the run time of `went` jobs, divided by the lane's weight, to the start tag of
-- the lane: start-time fair queueing (Goyal, Vin, Cheng 1996).
local function charge_lane(t, lane, went)
  gen = gen or string.format('%.0f', now)
  virtual = math.max(tag[lane], virtual)
  tag[lane] = virtual + went * t.cost * t.weight / weights[lane]
  tags.v, tags.gen, tags['t:' .. lane] = virtual, gen, tag[lane]
end

-- charge adds the work of `went` jobs to the start tags of the lane and of the tenant. It also
-- charges the tenant for what it owes: the run time of its earlier jobs that it was not charged for
-- (see outcome). The tenant moves from the set `from` (fair or over) to the set `to`; if it is
-- `empty`, it leaves the lane.
local function charge(t, lane, start, went, empty, from, to)
  local cost = went * t.cost + t.owe / t.weight
  if t.owe ~= 0 then call('HSET', t.key, 'owe:' .. typ, math.min(0, cost) * t.weight) end
  cost = math.max(0, cost)
  charge_lane(t, lane, went)
  tags['v:' .. lane] = start
  if empty then
    leave_lane(typ, lane, t.name, start + cost, gen)
    count_left(lane, from)
  else
    call('ZADD', (to == 'over' and over or fair) .. ':' .. lane, start + cost, t.name)
    if from ~= to then
      call('ZREM', (from == 'over' and over or fair) .. ':' .. lane, t.name)
      entitled[lane] = entitled[lane] + (to == 'fair' and 1 or -1)
      borrowing[lane] = borrowing[lane] + (to == 'fair' and -1 or 1)
    end
  end
end

local quantum, many
do
  -- quantum returns how many jobs a tenant gets in a row: an equal part of the capacity; if there
  -- is much capacity, at least a number that is worth the cost of a pick; more, if the workers run
  -- them within 1 ms. many is its upper bound.
  local in_a_ms = floor(slots / math.max(0.001, tonumber(load[2] or 1)))
  local few = math.max(20, math.min(2 * PICK, in_a_ms))
  many = math.max(PICK, math.min(2 * PICK, in_a_ms))
  function quantum(tenants)
    local equal = math.ceil(capacity / math.max(1, tenants))
    return math.min(capacity - moved, many, math.max(equal, math.min(few, floor(capacity / 2.5)), 1))
  end
end

local finish
do
  -- finish returns how many jobs a tenant may get in one turn to complete a group of which n jobs
  -- are left, even beyond quantum and the capacity: so a small group does not wait between the jobs
  -- of a large one. It returns 0 unless the jobs are few and quick. For a new tenant the type's
  -- mean run time counts, and as many jobs as the workers have slots are allowed in any case.
  local FEW, FEW_MS = 20, 30
  function finish(t, n)
    if n > FEW or slots == 0 then return 0 end
    n = math.min(n, cap - undelivered - moved, may_start - moved)
    if n * (t.est or tonumber(load[2] or 1)) <= FEW_MS * slots then return n end
    return t.est and 0 or math.min(n, slots)
  end
end

local capacity_for, kept
do
  -- capacity_for returns how many jobs a tenant may get. If other tenants had quick jobs in the
  -- last QUICK_MS, tenants with long jobs leave three of ten slots (kept) free for quick ones,
  -- because a job in flight can't be interrupted. For other tenants it returns many: no bound.
  local LONG_MS, LONG = 100, 10
  kept = math.max(0, math.min(math.ceil(slots * 0.3), slots - 1))
  function capacity_for(t)
    if slots == 0 or not t.est or not quick or t.est < LONG_MS or t.est < LONG * quick then return many end
    return slots - kept - entries - moved
  end
end

-- next_lane returns the lane whose turn it is: the one with the lowest start tag. Tags below the
-- virtual time count as equal to it; of equal lanes the first in LANES is taken. count has, by
-- lane, how many tenants or groups can be served there; lanes with 0 are passed over. nil: all have
-- 0.
local function next_lane(count)
  local lane
  for _, l in ipairs(LANES) do
    if count[l] > 0 and (not lane or math.max(tag[l], virtual) < math.max(tag[lane], virtual)) then lane = l end
  end
  return lane
end

-- deny_global records that a tenant got no permit because the global limit has none left. It sets
-- the reply's denials, state (LIMITED) and wait (until the next permit).
local function deny_global(tenant)
  deny(tenant, 'global')
  rate_bound(B .. 'rate', g.rd, now)
  if moved > 0 then -- g.next_at is older than the permits that this call has spent
    local h = call('HMGET', B .. 'rate', LIMIT_FIELDS[LIMITER][1], LIMIT_FIELDS[LIMITER][2])
    local _, next_at = left[LIMITER](B .. 'rate', h[1], h[2], g.permits)
    g.next_at = next_at
  end
  state, wait = 'LIMITED', math.max(0, math.ceil((g.next_at - US) / 1000))
end

-- by_fairness serves lanes and tenants that have permits of their own. Tenants that have spent
-- their share move to the sets `over`, if shares are elastic, because they may borrow. Otherwise,
-- or with a rate limit of their own, they are rate-limited. It returns whether tenants in `over`
-- may borrow now: no other tenant is left to be served.
local function by_fairness()
  -- with_permits returns the first borrowing tenant of a lane and its start tag, if it has permits
  -- of its own again or is paused, so that it must leave the set over; otherwise nil.
  local function with_permits(lane)
    if borrowing[lane] == 0 then return nil end
    local first = call('ZRANGE', over .. ':' .. lane, 0, 0, 'WITHSCORES')
    if #first == 0 then
      borrowing[lane] = 0
      return nil
    end
    local t = look(first[1])
    if not t.can or t.can > 0 or t.paused then return t, tonumber(first[2]) end
    return nil
  end
  -- The tables cache, by lane, what with_permits returned; up_to_date says whether the entry is
  -- valid.
  local eligible, eligible_start, up_to_date = {}, {}, {}
  -- A tenant with long jobs for which capacity_for leaves no worker is skipped. The first such
  -- tenant is next_long. It must not starve: at the turn of a tenant of its lane whose tag is
  -- higher by the cost of more than two of its jobs, the call stops. If it has admitted nothing,
  -- the fetcher is woken when a slot is free for next_long.
  local skipped, next_long = { high = 0, normal = 0, low = 0 }, nil
  local function await_next_long()
    if moved > 0 then return end
    full_at, state = slots - kept - 1, 'FULL'
    store_full(full_at)
  end
  local looks = 0
  while moved < capacity do
    looks = looks + 1
    if looks > LOOKS then
      state = 'OK'
      return false
    end
    local have = {}
    for _, l in ipairs(LANES) do
      if not up_to_date[l] then
        eligible[l], eligible_start[l] = with_permits(l)
        up_to_date[l] = true
      end
      have[l] = entitled[l] - skipped[l] + (eligible[l] and 1 or 0)
    end
    local lane = next_lane(have)
    if not lane then
      if not next_long then return true end
      await_next_long()
      return false
    end
    local first = call('ZRANGE', fair .. ':' .. lane, skipped[lane], skipped[lane], 'WITHSCORES')
    local t, start, from = nil, tonumber(first[2]), 'fair'
    if eligible[lane] and (not start or eligible_start[lane] <= start) then
      t, start, from = eligible[lane], eligible_start[lane], 'over'
      up_to_date[lane] = nil
    end
    if limited and g.left <= 0 then
      deny_global(t and t.name or first[1])
      return false
    end
    t = t or look(first[1])
    local group, n = group_of(t, lane, start, from)
    if not group then -- the tenant has left
    elseif next_long and lane == next_long.lane and start > next_long.start + 2 * next_long.cost then
      await_next_long()
      return false
    elseif capacity_for(t) <= 0 then
      if from == 'over' then
        eligible[lane], up_to_date[lane] = nil, true
      else
        skipped[lane] = skipped[lane] + 1
      end
      if not next_long then next_long = { lane = lane, start = start, cost = t.cost } end
    elseif not t.can or t.can > 0 then
      local k = math.min(math.max(quantum(entitled[lane]), finish(t, n)), t.can or many, capacity_for(t))
      local went, empty = admit_jobs(t, lane, group, n, k)
      charge(t, lane, start, went, empty, from, 'fair')
      for _, l in ipairs(LANES) do -- what with_permits read of this tenant is out of date
        if eligible[l] and eligible[l].name == t.name then up_to_date[l] = nil end
      end
    elseif elastic and not t.rps and t.left <= 0 then
      call('ZADD', over .. ':' .. lane, start, t.name)
      call('ZREM', fair .. ':' .. lane, t.name)
      entitled[lane], borrowing[lane] = entitled[lane] - 1, borrowing[lane] + 1
    else
      rate_limit_tenant(t, lane, group, n)
    end
  end
  return false
end

-- by_borrowing serves the tenants in `over`, which have spent their share, by start tag. They get
-- the permits that no other tenant may claim.
local function by_borrowing()
  local spare = g.left - reserved(g, typ, now) - reserved_due(g, now)
  while moved < capacity do
    local lane = next_lane(borrowing)
    if not lane then return end
    local first = call('ZRANGE', over .. ':' .. lane, 0, 0, 'WITHSCORES')
    if spare <= 0 then
      if g.left <= 0 then
        deny_global(first[1])
      else
        deny(first[1], 'per_group')
        rate_bound(B .. 'rate', g.rd, now)
        state, wait = 'LIMITED', math.max(1, math.min(2, math.ceil((g.next_at - US) / 1000)))
      end
      return
    end
    local t, start = look(first[1]), tonumber(first[2])
    local group, n = group_of(t, lane, start, 'over')
    if not group then -- the tenant has left
    elseif t.rps then -- the tenant has a rate limit of its own now: it can't borrow
      rate_limit_tenant(t, lane, group, n)
    else
      local went, empty = admit_jobs(t, lane, group, n, math.min(quantum(borrowing[lane]), spare))
      spare = spare - went
      charge(t, lane, start, went, empty, 'over', 'over')
    end
  end
end

-- by_priority serves the lanes by weight, and the groups of a lane in the order of the priority
-- formula.
local function by_priority()
  local looks = 0
  while moved < capacity do
    looks = looks + 1
    if looks > LOOKS then
      state = 'OK'
      return
    end
    local groups = {}
    for _, l in ipairs(LANES) do groups[l] = call('ZCARD', B .. 'priority:' .. typ .. ':' .. l) end
    local lane = next_lane(groups)
    if not lane then return end
    local order = B .. 'priority:' .. typ .. ':' .. lane
    local group = call('ZREVRANGE', order, 0, 0)[1]
    local tenant = call('HGET', B .. 'group:' .. group, 'tenant')
    if tenant then precheck('ZCARD', fair .. ':' .. lane .. ':' .. tenant) end
    local n = call('LLEN', B .. 'queue:' .. group .. ':' .. typ)
    if not tenant or n == 0 then
      call('ZREM', order, group)
    elseif limited and g.left <= 0 then
      return deny_global(tenant)
    else
      local t = look(tenant)
      if t.paused or at_bound(t) then
        call('ZREM', order, group)
      elseif not t.can or t.can > 0 then
        local went, empty = admit_jobs(t, lane, group, n, math.min(capacity - moved, PICK, t.can or PICK))
        charge_lane(t, lane, went)
        local start = empty and in_lane(typ, lane, tenant)
        if start then leave_lane(typ, lane, tenant, start, gen) end
      else
        rate_limit_tenant(t, lane, group, n)
      end
    end
  end
end

if by_group then
  by_priority()
elseif by_fairness() and elastic and limited then
  by_borrowing()
end

local changes = {}
for field, value in pairs(tags) do changes[#changes + 1], changes[#changes + 2] = field, value end
if #changes > 0 then call('HSET', fair, unpack(changes)) end
if taken > 0 then call('HINCRBY', load_key, 'waiting', -taken) end
if moved > 0 then
  if state == 'EMPTY' or state == 'FULL' then state = 'OK' end
  if moved >= free or T and T.places and moved >= may_start then
    store_full(full_at)
    if state == 'OK' then state = 'FULL' end
  elseif T and T.left <= 0 and state == 'OK' then -- T.next_at is older than the permits of this call
    local h = call('HMGET', T.key, LIMIT_FIELDS[LIMITER][1], LIMIT_FIELDS[LIMITER][2])
    local _, next_at = left[LIMITER](T.key, h[1], h[2], T.permits)
    state, wait = 'LIMITED', math.max(0, math.ceil((next_at - US) / 1000))
  end
end
if state == 'EMPTY' then
  local next_permit = call('ZRANGE', rate_limited, 0, 0, 'WITHSCORES')
  if #next_permit > 0 then wait = math.max(0, tonumber(next_permit[2]) - now) end
end
return { state, moved, non_ready, wait, permits, denials, traced, US }
