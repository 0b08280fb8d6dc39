-- promote: jobs whose time has come and that get a permit.  non-ready → ready
-- KEYS  base
-- ARGV  most jobs, window ms, permits a window (0 = no limit), seed of span ids, ms to wait for a full ready stream, then pairs of type and cap
-- Reply {moved, skipped for a full ready stream, wait ms until something can be done (-1: nothing is parked),
--        {tenant, permits, …}, {tenant, reason, …}, {group, ordinal, tenant, trace, span id, since, now, attempt, reason, …}}
-- Tenants come in the order of what is due longest, so that one which got its share stands behind those that got none.
-- A job leaves non-ready last. Twice: the second call finds the jobs gone. Goes through when memory is full. Cost: some µs a job.
local most, width, permits, seed, full_wait = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
-- At most so many jobs are looked at for one that may go; the next look at the tenant goes on behind them (field look): a type whose
-- ready stream is full hides no other type of the same tenant.
local LOOK = 1000
local room = {}
for i = 6, #ARGV, 2 do
  local stream = B .. 'ready:' .. ARGV[i]
  local undelivered = call('XLEN', stream)
  if undelivered > 0 then
    local p = redis.pcall('XPENDING', stream, 'workers')
    if not p.err then undelivered = math.max(0, undelivered - p[1]) end
  end
  room[ARGV[i]] = tonumber(ARGV[i + 1]) - undelivered
  see('HLEN', B .. 'load:' .. ARGV[i])
end
local now = now_ms()
local moved, skipped, looked, allowed, denied, traced, traces = 0, 0, 0, {}, {}, {}, 0
local due = call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, 64)
local at, used = window(B .. 'rate', width, now)
local part = permits > 0 and share(permits) or 0
see('SCARD', B .. 'active')
see('LLEN', B .. 'garbage')
if #due > 0 then pass_oom() end

-- choose looks at a tenant's jobs that are due and moves none: those that go, those that are no jobs of the ledger any more, what can't be read,
-- and until when there is no use in looking again.
local function choose(tenant, mine, tenant_used)
  local set, going, dropped, garbage, groups, named, not_before = B .. 'non-ready:' .. tenant, {}, {}, {}, {}, {}, nil
  local tenant_key = B .. 'tenant:' .. tenant
  local look = tonumber(call('HGET', tenant_key, 'look') or 0)
  local offset, page = look, nil
  repeat
    page = call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', offset, most)
    offset = offset + #page
    for i, blob in ipairs(page) do
      if moved + #going >= most then return going, dropped, garbage, nil end
      if looked >= LOOK then
        if #going == 0 then call('HSET', tenant_key, 'look', offset - #page + i - 1) end
        return going, dropped, garbage, not_before
      end
      looked = looked + 1
      local j = parse(blob)
      if not j then
        garbage[#garbage + 1] = blob
      elseif (room[j.typ] or 0) <= 0 then
        skipped, not_before = skipped + 1, now + full_wait
      else
        local g = groups[j.group]
        if g == nil then
          g = call('HGET', B .. 'group:' .. j.group, 'status') or 'CANCELLED'
          groups[j.group] = g
        end
        local job = j.group .. '.' .. j.ordinal
        local state = call('GETRANGE', B .. 'states:' .. j.group, j.ordinal * 2, j.ordinal * 2 + 1)
        if g == 'CANCELLED' or named[job] or state ~= 'N' .. mark(j.attempt) then
          dropped[#dropped + 1] = { j, blob }
        elseif permits > 0 and (used >= permits or tenant_used >= mine) then
          -- Who was denied by the global limit alone keeps its place in the order.
          local own = tenant_used >= mine
          denied[#denied + 1] = tenant
          denied[#denied + 1] = own and 'per_group' or 'global'
          return going, dropped, garbage, own and at + width or nil
        else
          named[job] = true
          going[#going + 1] = { j, blob }
          room[j.typ], used, tenant_used = room[j.typ] - 1, used + 1, tenant_used + 1
        end
      end
    end
  until #page < most
  if look > 0 then call('HDEL', tenant_key, 'look') end
  return going, dropped, garbage, not_before
end

-- to_ready puts one job into its ready stream.
local function to_ready(tenant, j, blob)
  local waited = math.max(0, now - j.since)
  if j.reason == 'R' then j.wr = j.wr + waited elseif j.reason ~= 'S' then j.wc = j.wc + waited end
  if j.trace ~= '' then
    traces = traces + 1
    local id = mint(seed, traces)
    for _, v in ipairs({ j.group, j.ordinal, tenant, j.trace, id, string.format('%.0f', j.since), now, j.attempt + 1, j.reason }) do traced[#traced + 1] = v end
    j.trace = follow(j.trace, id)
  end
  j.attempt, j.since, j.reason = j.attempt + 1, now, ''
  call('XADD', B .. 'ready:' .. j.typ, '*', 'j', compose(j, blob))
  call('SETRANGE', B .. 'states:' .. j.group, j.ordinal * 2, 'R' .. mark(j.attempt))
end

for _, tenant in ipairs(due) do
  if moved >= most or looked >= LOOK or (permits > 0 and used >= permits) then break end
  local set, tenant_key = B .. 'non-ready:' .. tenant, B .. 'tenant:' .. tenant
  local tenant_at, tenant_used = window(tenant_key, width, now)
  local mine = part
  if permits > 0 and call('SISMEMBER', B .. 'active', tenant) == 0 then mine = math.max(1, floor(permits / (call('SCARD', B .. 'active') + 1))) end
  local going, dropped, garbage, not_before = choose(tenant, mine, tenant_used)
  local gone, load, ready, congested, wanted = garbage, {}, {}, 0, 0
  local function leave(j, blob)
    gone[#gone + 1] = blob
    load[j.typ] = (load[j.typ] or 0) + 1
    if j.reason ~= 'S' then congested = congested + 1 end
    if j.reason == 'R' then wanted = wanted + 1 end
  end
  for _, blob in ipairs(garbage) do set_aside('non-ready:' .. tenant, blob) end
  for _, d in ipairs(dropped) do leave(d[1], d[2]) end
  for _, g in ipairs(going) do
    local group = g[1].group
    ready[group] = (ready[group] or 0) + 1
    leave(g[1], g[2])
    to_ready(tenant, g[1], g[2])
  end
  for group, n in pairs(ready) do add(B .. 'group:' .. group, 'non_ready', -n, 'ready', n) end
  if #gone > 0 then
    for typ, n in pairs(load) do call('HINCRBY', B .. 'load:' .. typ, 'non_ready', -n) end
    add(tenant_key, 'congested', -congested)
    activate(tenant, -wanted)
    call('ZREM', set, unpack(gone))
  end
  if #going > 0 then
    moved = moved + #going
    allowed[#allowed + 1] = tenant
    allowed[#allowed + 1] = #going
    if permits > 0 then
      spend(tenant_key, tenant_at, tenant_used + #going)
      spend(B .. 'rate', at, used)
    end
  end
  reindex(tenant, not_before)
end

local first, wait = call('ZRANGE', B .. 'non-ready', 0, 0, 'WITHSCORES'), -1
if #first > 0 then wait = math.max(0, tonumber(first[2]) - now) end
if wait == 0 and permits > 0 and used >= permits then
  wait = at + width - now
  if #denied == 0 then denied = { first[1], 'global' } end
end
return { moved, skipped, wait, allowed, denied, traced }
