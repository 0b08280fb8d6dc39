-- quota: changes or reads what a partition has of the limits: permits of the global limit and of the
-- rates of types, and places of the bounds of types. One process at a time, the leader of the limits,
-- calls it (see lead). It adds to a partition only what others do not hold any more. These fields are
-- the truth by which admit and promote decide: no process has a copy.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1   fence    n    fencing number of the leader
--   2   step     n    number of the call, of this leader's. Calls of a lower fence, or of the same fence
--                     and a lower number, are refused: they are late
--   3   limiter  -    fixed, sliding or token
--   4   width    ms   length of a window
--   5   rev      n    revision of the settings that the call carries out; -1 = only read
--   6   share    -    static or elastic
--   7   tag      -    name of the limit and of the number of partitions, for processes that know no
--                     layout 3; '' = one partition
--   8   wake     0|1  1 = tenants that wait for a permit are looked at again at once: a limit is higher
--   then for each limit, the global one first. A type that is not listed has none any more:
--   +1  kind        -   rate (permits a window) or places (entries of the ready stream)
--   +2  typ         -   the type; '' = all jobs
--   +3  total       n   the limit of all partitions together; 0 with '' = no limit
--   +4  to          n   this partition's part; -1 = leave it as it is
--   +5  not_before  µs  an increase is not effective in full before this time; with the limiter token,
--                       and of places, it always is at once
--   +6  at_once     n   part of the increase that is effective at once
-- Reply
--   {'FENCED', fence}       the call is late: a leader with this number has called
--   {'OK', active, limit…}  active: number of the partition's active tenants; for each limit
--   {total, held, from, demand, q}
--     total   the limit of which this partition had a part before the call; -1 = of none
--     held    what others may not have: its part, or what is used of an earlier larger one
--     from    µs from which on the last change is effective in full, 0 = it is
--     demand  waiting and due jobs that could use permits; for places also those that hold one
--     q       its part now
-- A decrease is effective at once. Permits that were spent in this window (fixed) count until it
-- ends. Permits that were spent in the last window (sliding) count less and less. With the token
-- limiter the permits in the bucket stay, as far as they fit. Places that are used beyond the part are
-- held until their jobs end.
-- Twice: the second call changes nothing.
-- Out of memory: goes through.
-- Cost: some commands for each type and each tenant with due jobs; with wake also the number of
-- rate-limited tenants.
local fence, step, rev, policy = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[5]), ARGV[6]
LIMITER, WIDTH = ARGV[3], tonumber(ARGV[4])
US = now_us()
local now, key, width = floor(US / 1000), B .. 'rate', WIDTH * 1000
local F = LIMIT_FIELDS[LIMITER]
local h = call('HMGET', key, 'qx', 'qs', 'total', 'qt', 'types', 'share', 'idle')
local at = tonumber(h[1] or 0)
if at > fence or at == fence and tonumber(h[2] or 0) > step then return { 'FENCED', at } end
local types = call('ZREVRANGE', B .. 'types', 0, TYPES - 1)
precheck('ZCARD', B .. 'non-ready')
precheck('LLEN', B .. 'wake:fetcher', B .. 'wake:dispatcher')
for _, typ in ipairs(types) do precheck('ZCARD', B .. 'rate-limited:' .. typ) end
for i = 10, #ARGV, 6 do
  if ARGV[i] ~= '' then
    precheck('HLEN', B .. 'rate:' .. ARGV[i])
    precheck('XLEN', B .. 'ready:' .. ARGV[i])
  end
end
allow_oom()
call('HSET', key, 'qx', fence, 'qs', step)

-- set_rate changes or reads the quota in the hash k, of which total is the limit. Its reply is that of
-- the script, but for demand.
local function set_rate(k, old_total, total, to, not_before, at_once)
  local r = call('HMGET', k, 'q', 'q2', 'qf', F[1], F[2])
  local q, q2, from = tonumber(r[1] or 0), tonumber(r[2] or nil), tonumber(r[3] or 0)
  if q2 and US >= from then q, q2 = q2, nil end
  if old_total <= 0 and to then q, q2 = to, nil end -- it had no limit, or knew none
  if to and (to ~= (q2 or q) or old_total ~= total) then
    if LIMITER == 'token' then
      local debt = math.max(0, math.min(width, tonumber(r[4] or 0) - US))
      local tokens = math.min(to, (width - debt) / width * q)
      call('HSET', k, 't', string.format('%.2f', to > 0 and US + width - tokens / to * width or US + width))
      q, q2 = to, nil
    elseif to <= q then
      local spent = LIMITER == 'fixed' and 0 - left.fixed(k, r[4], r[5], 0) or 0
      q, q2 = to, nil
      if spent > to then q2, from = to, US - US % width + width end
    elseif US >= not_before then
      q, q2 = to, nil
    else
      q, q2, from = q + at_once, to, not_before
    end
    call('HSET', k, 'total', total, 'q', q)
    if q2 then call('HSET', k, 'q2', q2, 'qf', string.format('%.0f', from)) else call('HDEL', k, 'q2', 'qf') end
  end
  -- Permits that were spent within the last window count, even if the quota is smaller by now.
  local held = q
  if LIMITER ~= 'token' then
    local s = call('HMGET', k, F[1], F[2])
    held = math.max(q, 0 - left[LIMITER](k, s[1], s[2], 0))
    -- What was spent beyond q is given back when the window ends, also if q has grown since.
    if LIMITER == 'fixed' and held > q and not q2 then q2, from = q, US - US % width + width end
  end
  return { old_total, held, q2 and from or 0, 0, q }
end

local reply, limits, entries_of = { 'OK', call('SCARD', B .. 'active') }, {}, {} -- limits: by type {rate, places}
for i = 9, #ARGV, 6 do
  local kind, typ, total = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local to, not_before, at_once = tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
  if rev < 0 or to < 0 then to = nil end
  if typ == '' then
    local old = tonumber(h[3] or string.match(h[4] or '', '^%d+') or -1)
    reply[#reply + 1] = set_rate(key, old, total, to, not_before, at_once)
  else
    local spec = call('HGET', key, 'type:' .. typ)
    local rated, places = string.match(spec or '', '^(%d) (%S+)$')
    limits[typ] = limits[typ] or { 0, '-' }
    entries_of[typ] = entries_of[typ] or call('XLEN', B .. 'ready:' .. typ)
    if kind == 'rate' then
      local k = B .. 'rate:' .. typ
      local old = rated == '1' and tonumber(call('HGET', k, 'total') or -1) or 0
      reply[#reply + 1], limits[typ][1] = set_rate(k, old, total, to, not_before, at_once), 1
    else
      local p = tonumber(places)
      local old = p and tonumber(call('HGET', key, 'places:' .. typ) or -1) or 0
      if to then
        p = to
        call('HSET', key, 'places:' .. typ, total)
      end
      limits[typ][2] = p or '-'
      reply[#reply + 1] = { old, math.max(p or 0, entries_of[typ]), 0, 0, p or 0 }
    end
  end
end
if rev >= 0 then
  local names = {}
  for typ, l in pairs(limits) do
    names[#names + 1] = typ
    call('HSET', key, 'type:' .. typ, l[1] .. ' ' .. l[2])
    if l[1] == 0 then call('UNLINK', B .. 'rate:' .. typ) end
    if l[2] == '-' then call('HDEL', key, 'places:' .. typ) end
  end
  for typ in string.gmatch(h[5] or '', '[^|]+') do
    if not limits[typ] then
      call('HDEL', key, 'type:' .. typ, 'places:' .. typ)
      call('UNLINK', B .. 'rate:' .. typ)
    end
  end
  table.sort(names)
  if #names > 0 then call('HSET', key, 'types', table.concat(names, '|')) else call('HDEL', key, 'types') end
  call('HSET', key, 'rev', rev, 'share', policy, 'qt', ARGV[7])
end

-- Jobs that could use permits: those that wait or are due.
local demand, by_type, limited = 0, {}, #ARGV > 14
for _, typ in ipairs(types) do
  local load = call('HMGET', B .. 'load:' .. typ, 'waiting', 'full', 'due')
  local waiting = 0
  if not is_paused('y', typ) then waiting = math.max(0, tonumber(load[1] or 0)) end
  if limits[typ] then
    local due_at, due = string.match(load[3] or '', '^(%d+) (%d+)$')
    by_type[typ] = waiting + (due and math.abs(now - due_at) < 1000 and due or 0)
  end
  if not is_stuck(load[2], now) then demand = demand + math.min(waiting, limited and room_of(typ, limits[typ]) or waiting) end
end
for _, tenant in ipairs(call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, TENANTS)) do
  demand = demand + call('ZCOUNT', B .. 'non-ready:' .. tenant, '-inf', now)
end
if reply[2] == 0 and call('ZCOUNT', B .. 'non-ready', '-inf', now) == 0 then demand = 0 end
for i = 3, #reply do
  local at_arg = 9 + (i - 3) * 6
  local kind, typ = ARGV[at_arg], ARGV[at_arg + 1]
  reply[i][4] = typ == '' and demand or (by_type[typ] or 0) + (kind == 'places' and entries_of[typ] or 0)
end

-- With static shares, a tenant whose waiting jobs all lack a permit or a place of their type has no
-- share: global takes it from the active ones. Up to TENANTS tenants of each lane are looked at.
local idle, idle_xw, blocked = 0, 0, {} -- blocked: by tenant, how many of its jobs these are
if (rev < 0 and h[6] or policy) == 'static' then
  for typ in pairs(limits) do
    if room_of(typ, true) <= 0 then
      for _, lane in ipairs({ 'high', 'normal', 'low' }) do
        for _, tenant in ipairs(call('ZRANGE', B .. 'fair:' .. typ .. ':' .. lane, 0, TENANTS - 1)) do
          for _, group in ipairs(call('ZRANGE', B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant, 0, TENANTS - 1)) do
            blocked[tenant] = (blocked[tenant] or 0) + call('LLEN', B .. 'queue:' .. group .. ':' .. typ)
          end
        end
      end
    end
  end
end
for tenant, n in pairs(blocked) do
  local t = call('HMGET', B .. 'tenant:' .. tenant, 'active', 'weight')
  if tonumber(t[1] or 0) <= n and call('SISMEMBER', B .. 'active', tenant) == 1 then
    idle, idle_xw = idle + 1, idle_xw + extra_weight(t[2])
  end
end
if idle > 0 then
  call('HSET', key, 'idle', idle, 'idle_xw', idle_xw)
elseif h[7] then
  call('HDEL', key, 'idle', 'idle_xw')
end

-- Tenants that wait for a permit are looked at again at once, and so are due jobs and the markers of
-- such tenants, of 1,000 tenants.
if ARGV[8] == '1' then
  for _, typ in ipairs(types) do
    local k = B .. 'rate-limited:' .. typ
    if call('EXISTS', k) == 1 then call('ZUNIONSTORE', k, 1, k, 'WEIGHTS', 0) end
  end
  local marker, far = '^[^|]*|[^|]*|' .. string.rep('%d+|', 8) .. 'R|', string.format('(%.0f', FAR)
  for _, tenant in ipairs(call('ZRANGEBYSCORE', B .. 'non-ready', '(' .. now, far, 'LIMIT', 0, 1000)) do
    local k = B .. 'non-ready:' .. tenant
    local first = call('ZRANGE', k, 0, 9, 'WITHSCORES')
    for i = 1, #first, 2 do
      if tonumber(first[i + 1]) > now and string.find(first[i], marker) then call('ZADD', k, now, first[i]) end
    end
    reindex(tenant)
  end
  wake('fetcher')
  wake('dispatcher')
end
return reply
