-- promote: jobs whose time has come and that get a permit.  non-ready → ready
-- KEYS  base
-- ARGV  most jobs, window ms, permits a window (0 = no limit), seed of span ids, ms to wait for a full ready stream, then pairs of type and cap
-- Reply {moved, skipped for a full ready stream, wait ms until something is due (-1: nothing is parked),
--        {tenant, permits, …}, {tenant, reason, …}, {group, ordinal, tenant, trace, span id, since, now, attempt, reason, …}}
-- A job leaves non-ready last. Twice: the second call finds the jobs gone. Goes through when memory is full. Cost: some µs a job.
local most, width, permits, seed, full_wait = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local room, closed = {}, {}
for i = 6, #ARGV, 2 do
  local stream = B .. 'ready:' .. ARGV[i]
  local undelivered = call('XLEN', stream)
  if undelivered > 0 then
    local p = redis.pcall('XPENDING', stream, 'workers')
    if not p.err then undelivered = math.max(0, undelivered - p[1]) end
  end
  room[ARGV[i]] = tonumber(ARGV[i + 1]) - undelivered
end
local now = now_ms()
local moved, skipped, allowed, denied, traced, traces = 0, 0, {}, {}, {}, 0
local due = call('ZRANGEBYSCORE', B .. 'non-ready', '-inf', now, 'LIMIT', 0, 64)
local at, used = window(B .. 'rate', width, now)
local part = permits > 0 and share(permits) or 0
if #due > 0 then pass_oom() end

-- to_ready moves one parked job; false when it is not there any more in the ledger's eyes.
local function to_ready(tenant, blob, j)
  local group_key = B .. 'group:' .. j.group
  local g = call('HMGET', group_key, 'status', 'tenant')
  local ords = { j.ordinal }
  local states, span = load_states(j.group, ords)
  if states[1] ~= 'N' .. mark(j.attempt) or g[1] == 'CANCELLED' then return false end
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
  store_states(j.group, ords, { 'R' .. mark(j.attempt) }, span)
  add(group_key, 'non_ready', -1, 'ready', 1)
  return true
end

for _, tenant in ipairs(due) do
  if moved >= most then break end
  local set, tenant_key = B .. 'non-ready:' .. tenant, B .. 'tenant:' .. tenant
  local tenant_at, tenant_used = window(tenant_key, width, now)
  local mine = part
  if permits > 0 and call('SISMEMBER', B .. 'active', tenant) == 0 then mine = math.max(1, floor(permits / (call('SCARD', B .. 'active') + 1))) end
  local not_before, before = nil, tenant_used
  for _, blob in ipairs(call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, most - moved)) do
    local j = parse(blob)
    if not j then
      set_aside('non-ready:' .. tenant, blob)
      call('ZREM', set, blob)
    elseif (room[j.typ] or 0) <= 0 then
      skipped = skipped + 1
      not_before = now + full_wait
    elseif permits > 0 and (used >= permits or tenant_used >= mine) then
      denied[#denied + 1] = tenant
      denied[#denied + 1] = used >= permits and 'global' or 'per_group'
      not_before = at + width
      break
    else
      local was, typ = j.reason, j.typ
      local went = to_ready(tenant, blob, j)
      call('ZREM', set, blob)
      call('HINCRBY', B .. 'load:' .. typ, 'non_ready', -1)
      if was ~= 'S' then call('HINCRBY', tenant_key, 'congested', -1) end
      if was == 'R' then activate(tenant, -1) end
      if went then
        room[typ], moved = room[typ] - 1, moved + 1
        allowed[tenant] = (allowed[tenant] or 0) + 1
        used, tenant_used = used + 1, tenant_used + 1
      end
    end
  end
  if permits > 0 and tenant_used > before then
    spend(tenant_key, tenant_at, tenant_used)
    spend(B .. 'rate', at, used)
  end
  reindex(tenant, not_before)
end

local first, wait = call('ZRANGE', B .. 'non-ready', 0, 0, 'WITHSCORES'), -1
if #first > 0 then wait = math.max(0, tonumber(first[2]) - now) end
local flat = {}
for tenant, n in pairs(allowed) do
  flat[#flat + 1] = tenant
  flat[#flat + 1] = n
end
return { moved, skipped, wait, flat, denied, traced }
