-- admit: takes the next jobs of a type out of the fair queue.  waiting → ready, or non-ready for the head of a tenant without a permit
-- KEYS  base
-- ARGV  type, most jobs, cap of the ready stream, window ms, permits a window (0 = no limit), seed of span ids, weights of high, normal, low
-- Reply {state, moved, parked, wait ms, {tenant, permits, …}, {tenant, reason, …}, {group, ordinal, tenant, trace, span id, accepted ms, now, …}}
--       state: 'OK' | 'FULL' the ready stream is | 'LIMITED' the global limit is reached | 'EMPTY' nothing waits that may run; wait -1: until woken
-- A job is never between two places: each pick is added to its new place before it leaves the old one, in one script.
-- Twice: the second call takes the next jobs. Goes through when memory is full. Cost: about 3 µs a job.
local typ, most, cap, width, permits, seed = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local weights = { high = tonumber(ARGV[7]), normal = tonumber(ARGV[8]), low = tonumber(ARGV[9]) }
local LANES, WAITING = { 'high', 'normal', 'low' }, string.byte('W')
local match, byte = string.match, string.byte
local stream, fair, load_key, parked_key = B .. 'ready:' .. typ, B .. 'fair:' .. typ, B .. 'load:' .. typ, B .. 'parked:' .. typ
local now = now_ms()
local moved, parked, allowed, denied, traced, traces = 0, 0, {}, {}, {}, 0

local undelivered = call('XLEN', stream)
if undelivered > 0 then
  local p = redis.pcall('XPENDING', stream, 'workers')
  if not p.err then undelivered = math.max(0, undelivered - p[1]) end
end
local room = math.min(most, cap - undelivered)
if room <= 0 then return { 'FULL', 0, 0, -1, {}, {}, {} } end

see('HLEN', fair, load_key, B .. 'rate')
see('SCARD', B .. 'active')
see('ZCARD', B .. 'non-ready', fair .. ':high', fair .. ':normal', fair .. ':low')
see('LLEN', B .. 'wake:dispatcher', B .. 'garbage')
pass_oom()

-- Tenants whose next permit has come take their places again.
for _, tenant in ipairs(call('ZRANGEBYSCORE', parked_key, '-inf', now, 'LIMIT', 0, 100)) do
  see('HLEN', B .. 'tenant:' .. tenant)
  local back = {}
  for _, lane in ipairs(LANES) do
    if call('ZCARD', fair .. ':' .. lane .. ':' .. tenant) > 0 then back[#back + 1] = lane end
  end
  for _, lane in ipairs(back) do enter_lane(typ, lane, tenant) end
  call('ZREM', parked_key, tenant)
end

local lanes = call('HMGET', fair, 't:high', 't:normal', 't:low', 'v')
local tag, waiting = {}, {}
for i, lane in ipairs(LANES) do
  tag[lane], waiting[lane] = tonumber(lanes[i] or 0), call('ZCARD', fair .. ':' .. lane)
end
local virtual = tonumber(lanes[4] or 0)
local at, used = window(B .. 'rate', width, now)
local part = permits > 0 and share(permits) or 0
local state, wait = 'EMPTY', -1

local function leave(lane, tenant, own)
  leave_lane(typ, lane, tenant, own)
  waiting[lane] = waiting[lane] - 1
end

-- next_group is the tenant's group with the least work left that really has a job.
local function next_group(lane, tenant)
  local of = fair .. ':' .. lane .. ':' .. tenant
  while true do
    local first = call('ZRANGE', of, 0, 0)
    if #first == 0 then return nil end
    if call('LLEN', B .. 'queue:' .. first[1] .. ':' .. typ) > 0 then return first[1], of end
    call('ZREM', of, first[1])
  end
end

-- take moves up to k jobs from the head of a group's queue. It returns how many went and how many left the queue.
local function take(group, tenant, k, place)
  local queue, key = B .. 'queue:' .. group .. ':' .. typ, B .. 'group:' .. group
  local popped = call('LRANGE', queue, 0, k - 1)
  local n, blobs, ords, accepted, traces, garbage = 0, {}, {}, {}, {}, {}
  for i = 1, #popped do
    local ordinal, at, trace = match(popped[i], '^(%d+)|(%d+)|([^|]*)|')
    if ordinal then
      n = n + 1
      blobs[n], ords[n], accepted[n], traces[n] = popped[i], tonumber(ordinal), at, trace
    else
      garbage[#garbage + 1] = popped[i]
    end
  end
  local new, went = {}, 0
  see('HLEN', key)
  if n > 0 then
    local states, span = load_states(group, ords)
    for i = 1, n do
      local letter, m = byte(states[i], 1, 2)
      if letter == WAITING then
        went = went + 1
        new[i] = place(blobs[i], ords[i], m - 33, accepted[i], traces[i])
      end
    end
    store_states(group, ords, new, span)
  end
  for _, blob in ipairs(garbage) do set_aside('queue:' .. group .. ':' .. typ, blob) end
  call('LPOP', queue, #popped)
  return went, #popped
end

-- traced_by tells of a traced job's admission, to wherever, and has the blob follow it.
local function traced_by(group, tenant, blob, ordinal, accepted, trace)
  if trace == '' then return blob end
  traces = traces + 1
  local id = mint(seed, traces)
  for _, v in ipairs({ group, ordinal, tenant, trace, id, accepted, now }) do traced[#traced + 1] = v end
  local front = ordinal .. '|' .. accepted .. '|'
  return front .. follow(trace, id) .. string.sub(blob, #front + #trace + 1)
end

-- Jobs that were taken in together have the same head, so it is put together once for them.
local function admit_to_ready(group, tenant)
  local head, to, head_attempt, head_accepted
  return function(blob, ordinal, attempt, accepted, trace)
    if attempt ~= head_attempt or accepted ~= head_accepted then
      head_attempt, head_accepted, to = attempt, accepted, 'R' .. mark(attempt + 1)
      head = group .. '|' .. typ .. '|' .. (attempt + 1) .. '|0|0|0|' .. string.format('%.0f', math.max(0, now - tonumber(accepted))) .. '|0|0|' ..
        string.format('%.0f', now) .. '||'
    end
    call('XADD', stream, '*', 'j', head .. traced_by(group, tenant, blob, ordinal, accepted, trace))
    return to
  end
end

local function park_head(group, tenant, due)
  return function(blob, ordinal, attempt, accepted, trace)
    park(tenant, typ, { due, group .. '|' .. typ .. '|' .. attempt .. '|0|0|0|' .. string.format('%.0f', math.max(0, now - tonumber(accepted))) ..
      '|0|0|' .. string.format('%.0f', now) .. '|R|' .. traced_by(group, tenant, blob, ordinal, accepted, trace) })
    return 'N' .. mark(attempt)
  end
end

-- settle writes the ledger after a take and lets an emptied group go.
local function settle(group, of, field, went, left)
  add(B .. 'group:' .. group, 'waiting', -went, field, went)
  call('HINCRBY', load_key, 'waiting', -left)
  if call('LLEN', B .. 'queue:' .. group .. ':' .. typ) == 0 then
    call('ZREM', of, group)
  else
    call('ZINCRBY', of, -left * AGE_MS, group)
  end
end

while moved < room do
  local lane
  for _, l in ipairs(LANES) do
    if waiting[l] > 0 and (not lane or math.max(tag[l], virtual) < math.max(tag[lane], virtual)) then lane = l end
  end
  if not lane then break end
  if permits > 0 and used >= permits then
    local head = call('ZRANGE', fair .. ':' .. lane, 0, 0)
    denied[#denied + 1] = head[1]
    denied[#denied + 1] = 'global'
    state, wait = 'LIMITED', at + width - now
    break
  end
  local first = call('ZRANGE', fair .. ':' .. lane, 0, 0, 'WITHSCORES')
  local tenant, start = first[1], tonumber(first[2])
  local tenant_key = B .. 'tenant:' .. tenant
  local tenant_at, tenant_used = window(tenant_key, width, now)
  local group, of = next_group(lane, tenant)
  if not group then
    leave(lane, tenant, start)
  else
    local k = math.min(room - moved, math.max(1, math.ceil(room / waiting[lane])), PICK)
    if permits > 0 then k = math.min(k, permits - used, part - tenant_used) end
    if k <= 0 then
      -- Without a permit the tenant is parked as a whole; only its head job moves, as the marker of its next start.
      local due = tenant_at + width
      denied[#denied + 1] = tenant
      denied[#denied + 1] = 'per_group'
      see('ZCARD', B .. 'non-ready:' .. tenant)
      local went, left = take(group, tenant, 1, park_head(group, tenant, due))
      settle(group, of, 'non_ready', went, left)
      call('ZADD', parked_key, due, tenant)
      call('HINCRBY', B .. 'group:' .. group, 'throttles', went)
      call('HINCRBY', tenant_key, 'congested', went)
      if left > went then activate(tenant, went - left) end
      for _, l in ipairs(LANES) do
        local own = call('ZSCORE', fair .. ':' .. l, tenant)
        if own then leave(l, tenant, own) end
      end
      parked = parked + went
    else
      local went, left = take(group, tenant, k, admit_to_ready(group, tenant))
      settle(group, of, 'ready', went, left)
      activate(tenant, -left)
      if permits > 0 then
        used = used + went
        spend(tenant_key, tenant_at, tenant_used + went)
        spend(B .. 'rate', at, used)
      end
      moved = moved + went
      allowed[tenant] = (allowed[tenant] or 0) + went
      -- Start-time fair queueing (Goyal, Vin, Cheng 1996), for lanes and for the tenants of a lane.
      virtual = math.max(tag[lane], virtual)
      tag[lane] = virtual + went / weights[lane]
      call('HSET', fair, 'v', virtual, 't:' .. lane, tag[lane], 'v:' .. lane, start)
      if call('ZCARD', of) == 0 then
        leave(lane, tenant, start + went)
      else
        call('ZADD', fair .. ':' .. lane, start + went, tenant)
      end
    end
  end
end

if moved > 0 then
  if state == 'EMPTY' then state = 'OK' end
end
if state == 'EMPTY' then
  local next_permit = call('ZRANGE', parked_key, 0, 0, 'WITHSCORES')
  if #next_permit > 0 then wait = math.max(0, tonumber(next_permit[2]) - now) end
end
local flat = {}
for tenant, n in pairs(allowed) do
  flat[#flat + 1] = tenant
  flat[#flat + 1] = n
end
return { state, moved, parked, wait, flat, denied, traced }
