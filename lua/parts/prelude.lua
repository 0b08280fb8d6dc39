-- prelude: what every script begins with. KEYS[1] is the partition's base, e.g. "bulk-action:{0}:"; all
-- other keys are built from it and so share its slot.
--
-- A job is a blob that moves:  queued  = ordinal|accepted_ms|trace|payload
--                              moving  = group|type|attempt|retries|throttles|losses|wait_fair|wait_rate|wait_congestion|since|reason|queued
-- An empty payload lies in payloads:GROUP. Reasons: R rate limited, A throttled by the API, E transient error, S scheduled, P paused.
-- A job's state is two bytes in states:GROUP at twice its ordinal: a letter and the attempt (33 + attempt % 90).
-- Letters: W waiting, N non-ready, R ready, I in flight, D done, A done and reduced, F failed, C cancelled.
local B, call, floor = KEYS[1], redis.call, math.floor

local function now_us()
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end
local function now_ms() return floor(now_us() / 1000) end

local function mark(attempt) return string.char(33 + attempt % 90) end

-- see reads keys that are going to be written, by a command that suits their type. What can be wrong with a key (it is of another type, or its slot is
-- being moved) then goes wrong while nothing is written yet: an error does not undo earlier writes. A helper that writes has a see of its own beside it.
local function see(read, ...)
  for i = 1, select('#', ...) do call(read, (select(i, ...))) end
end

-- pass_oom makes the script's first write one that Redis allows when its memory is full; everything after it then goes through.
local function pass_oom() call('XACK', B .. 'outbox', 'oom', '0-0') end

-- Spans of states: one read and one write for a batch of one group's jobs, where their ordinals ascend and lie close.
local SPAN = 4096
local function load_states(group, ords)
  local key, n, got = B .. 'states:' .. group, #ords, {}
  local lo, hi, ascending = ords[1], ords[n], true
  for i = 2, n do
    if ords[i] <= ords[i - 1] then ascending = false end
  end
  if ascending and hi - lo < SPAN then
    local s = call('GETRANGE', key, lo * 2, hi * 2 + 1)
    for i = 1, n do
      local at = (ords[i] - lo) * 2
      got[i] = string.sub(s, at + 1, at + 2)
    end
    return got, s
  end
  -- A job that is named twice counts once: R with a mark that no attempt has lets nothing happen to the second.
  local named = {}
  for i = 1, n do
    got[i] = named[ords[i]] and 'R ' or call('GETRANGE', key, ords[i] * 2, ords[i] * 2 + 1)
    named[ords[i]] = true
  end
  return got, nil
end

-- store_states writes new[i] (nil: unchanged) for the jobs that load_states has read.
local function store_states(group, ords, new, span)
  local key, n = B .. 'states:' .. group, #ords
  if not span then
    for i = 1, n do
      if new[i] then call('SETRANGE', key, ords[i] * 2, new[i]) end
    end
    return
  end
  local lo, out, from = ords[1], {}, 1
  for i = 1, n do
    if new[i] then
      local at = (ords[i] - lo) * 2
      if at + 1 > from then out[#out + 1] = string.sub(span, from, at) end
      out[#out + 1] = new[i]
      from = at + 3
    end
  end
  if #out == 0 then return end
  out[#out + 1] = string.sub(span, from)
  call('SETRANGE', key, lo * 2, table.concat(out))
end

-- Runs are jobs of one group with consecutive ordinals and one attempt: 'lo n attempt', ascending, joined by spaces.
local function parse_runs(text)
  local runs, n = {}, 0
  for lo, k, attempt in string.gmatch(text, '(%d+) (%d+) (%d+)') do
    local r = { lo = tonumber(lo), n = tonumber(k), attempt = tonumber(attempt) }
    runs[#runs + 1], n = r, n + r.n
  end
  return runs, n
end
local function expand(runs)
  local ords, attempts = {}, {}
  for _, r in ipairs(runs) do
    for i = 0, r.n - 1 do ords[#ords + 1], attempts[#attempts + 1] = r.lo + i, r.attempt end
  end
  return ords, attempts
end

-- turn prepares to turn all jobs of the runs from one state into another, if each is in it under its attempt (any: under whichever); nil if not.
-- The caller writes what it returns with turned.
local function turn(group, runs, from, to, any)
  local lo, last = runs[1].lo, runs[#runs]
  local hi, at = last.lo + last.n - 1, lo
  for _, r in ipairs(runs) do
    if r.lo < at then return nil end -- a job is named twice
    at = r.lo + r.n
  end
  if hi - lo >= SPAN then return nil end
  local span, out, after = call('GETRANGE', B .. 'states:' .. group, lo * 2, hi * 2 + 1), {}, 1
  for _, r in ipairs(runs) do
    local first, final = (r.lo - lo) * 2 + 1, (r.lo - lo + r.n) * 2
    local had, new = string.sub(span, first, final), nil
    if not any then
      local m = mark(r.attempt)
      if had == string.rep(from .. m, r.n) then new = string.rep(to .. m, r.n) end
    elseif #had == 2 * r.n then
      local text, n = string.gsub(had, from .. '(.)', to .. '%1')
      if n == r.n then new = text end
    end
    if not new then return nil end
    if first > after then out[#out + 1] = string.sub(span, after, first - 1) end
    out[#out + 1], after = new, final + 1
  end
  return { lo * 2, table.concat(out) }
end
local function turned(group, change) call('SETRANGE', B .. 'states:' .. group, change[1], change[2]) end

-- add moves numbers of a hash: add(key, 'waiting', -3, 'ready', 3); zeros cost nothing.
local function add(key, ...)
  local a = { ... }
  for i = 1, #a, 2 do
    if a[i + 1] ~= 0 then call('HINCRBY', key, a[i], a[i + 1]) end
  end
end

-- wake leaves a token for the idle processes of a role.
local function wake(role)
  local key = B .. 'wake:' .. role
  if call('LLEN', key) == 0 then call('LPUSH', key, '1') end
end

-- lying is how many entries a ready stream holds, and how many of them nobody has read.
local function lying(stream)
  local n = call('XLEN', stream)
  if n == 0 then return 0, 0 end
  local p = redis.pcall('XPENDING', stream, 'workers')
  if p.err then return n, n end -- nobody has read at all
  return n, math.max(0, n - p[1])
end

-- refill wakes the fetcher once a ready stream that it found full has room again: load.full holds what may be undelivered then, what
-- may lie there in all, and since when it is full.
local function refill(typ)
  local load_key, stream = B .. 'load:' .. typ, B .. 'ready:' .. typ
  local full = call('HGET', load_key, 'full')
  if not full then return end
  local undelivered, entries = string.match(full, '^(%d+) (%d+)')
  local n, unread = lying(stream)
  if n > tonumber(entries or n) or unread > tonumber(undelivered or n) then return end
  call('HDEL', load_key, 'full')
  wake('fetcher')
end

-- A tenant with quick jobs is remembered for so long.
local QUICK_MS = 10000

-- is_stuck says whether a type's stream has been full for so long that its jobs can't use permits now.
local STUCK_MS = 1000
local function is_stuck(full, now)
  local since = tonumber(string.match(full or '', '(%d+)$') or nil)
  return since ~= nil and now - since > STUCK_MS
end

-- attend asks the watcher to look at a group.
local function see_attend()
  see('SCARD', B .. 'attention')
  see('LLEN', B .. 'wake:watcher')
end
local function attend(group)
  call('SADD', B .. 'attention', group)
  wake('watcher')
end

-- activate counts n more (or fewer) jobs of a tenant that want a permit; a tenant is active while it has some and is not paused.
-- Each active tenant weighs 1 in the division of the limit; rate.xw holds what others weigh beyond that, in thousandths.
local function see_activate(tenant)
  see('HLEN', B .. 'tenant:' .. tenant, B .. 'rate')
  see('SCARD', B .. 'active')
end
local function extra_weight(weight) return floor((tonumber(weight or 1) - 1) * 1000 + 0.5) end
local function set_active(tenant)
  local t = call('HMGET', B .. 'tenant:' .. tenant, 'weight', 'paused')
  if t[2] or call('SADD', B .. 'active', tenant) == 0 then return end
  add(B .. 'rate', 'xw', extra_weight(t[1]))
end
local function set_inactive(tenant)
  if call('SREM', B .. 'active', tenant) == 0 then return end
  add(B .. 'rate', 'xw', -extra_weight(call('HGET', B .. 'tenant:' .. tenant, 'weight')))
end
local function activate(tenant, n)
  if n == 0 then return end
  local left = call('HINCRBY', B .. 'tenant:' .. tenant, 'active', n)
  if left > 0 and left <= n then set_active(tenant) end
  if left <= 0 then set_inactive(tenant) end
end

-- forget_tenant drops what is known of a tenant that has neither groups nor settings.
local function forget_tenant(tenant)
  local key = B .. 'tenant:' .. tenant
  local set = call('HMGET', key, 'rps', 'weight', 'base_priority', 'paused', 'unfinished')
  if set[1] or set[2] or set[3] or set[4] or tonumber(set[5] or 0) > 0 or call('ZCARD', B .. 'groups:' .. tenant) > 0 then return end
  call('UNLINK', key)
  call('ZREM', B .. 'tenants', tenant)
end

-- check_last lets a tenant without unfinished jobs out of the active set at once; its congestion starts afresh.
local function check_last(tenant)
  local key = B .. 'tenant:' .. tenant
  if tonumber(call('HGET', key, 'unfinished') or 0) > 0 or call('ZCARD', B .. 'non-ready:' .. tenant) > 0 then return end
  set_inactive(tenant)
  call('HDEL', key, 'active', 'congested')
  call('UNLINK', B .. 'congestion:' .. tenant)
  -- What is known of its types goes when these have become many.
  if call('HLEN', key) < 100 then return end
  for _, field in ipairs(call('HKEYS', key)) do
    if string.find(field, '^est:') or string.find(field, '^owe:') or string.find(field, '^tag:') then call('HDEL', key, field) end
  end
end

-- Least remaining work with aging: each waiting job of a group counts as much as this age (ms).
local AGE_MS = 100

-- enqueue puts n waiting jobs' worth of a group into its tenant's fair queue, and the tenant into the lane.
-- A tenant that returns starts at max(own tag, the lane's virtual time): idling earns nothing and costs nothing. A tag belongs to one life
-- of its type (gen, see retire): one from an earlier life says nothing.
local function see_enqueue(typ, lane, tenant)
  see('HLEN', B .. 'fair:' .. typ, B .. 'tenant:' .. tenant)
  see('ZCARD', B .. 'fair:' .. typ .. ':' .. lane, B .. 'over:' .. typ .. ':' .. lane, B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant,
    B .. 'parked:' .. typ, B .. 'priority:' .. typ)
end
local function enter_lane(typ, lane, tenant)
  local own = call('HGET', B .. 'tenant:' .. tenant, 'tag:' .. typ .. ':' .. lane)
  local f = call('HMGET', B .. 'fair:' .. typ, 'v:' .. lane, 'gen')
  local tag = tonumber(f[1] or 0)
  if own then
    local gen, at = string.match(own, '^(%d+) (.+)$')
    if gen == (f[2] or '0') then tag = math.max(tag, tonumber(at) or 0) end
  end
  call('ZADD', B .. 'fair:' .. typ .. ':' .. lane, tag, tenant)
end
local function leave_lane(typ, lane, tenant, own)
  local gen = call('HGET', B .. 'fair:' .. typ, 'gen') or '0'
  call('HSET', B .. 'tenant:' .. tenant, 'tag:' .. typ .. ':' .. lane, gen .. ' ' .. own)
  call('ZREM', B .. 'fair:' .. typ .. ':' .. lane, tenant)
  call('ZREM', B .. 'over:' .. typ .. ':' .. lane, tenant)
end
-- in_lane is a tenant's start tag, be it among those with permits of their own or among those that borrow.
local function in_lane(typ, lane, tenant)
  return call('ZSCORE', B .. 'fair:' .. typ .. ':' .. lane, tenant) or call('ZSCORE', B .. 'over:' .. typ .. ':' .. lane, tenant)
end

-- With FAIR_QUEUE_POLICY=priority the key policy holds ALPHA, and groups stand in one order, whoever's they are:
-- priority = -created_ms + base_priority + ALPHA * (-1 + total / max(1, total - done)), the user's own formula. A rank is written again whenever done or total changes.
local function alpha() return tonumber(call('GET', B .. 'policy') or nil) end
local function rank(group, factor)
  local g = call('HMGET', B .. 'group:' .. group, 'at:created', 'base_priority', 'total', 'accepted', 'done', 'tenant')
  local base = call('HGET', B .. 'tenant:' .. (g[6] or ''), 'base_priority')
  local total, done = math.max(tonumber(g[3] or 0), tonumber(g[4] or 0)), tonumber(g[5] or 0)
  return -tonumber(g[1] or 0) + tonumber(g[2] or 0) + tonumber(base or 0) + factor * (-1 + total / math.max(1, total - done))
end
local function see_rerank(types, factor)
  if not factor then return end
  for typ in string.gmatch(types or '', '[^|]+') do see('ZCARD', B .. 'priority:' .. typ) end
end
local function rerank(group, types, factor)
  if not factor then return end
  local score
  for typ in string.gmatch(types or '', '[^|]+') do
    if call('ZSCORE', B .. 'priority:' .. typ, group) then
      score = score or rank(group, factor)
      call('ZADD', B .. 'priority:' .. typ, score, group)
    end
  end
end

local function enqueue(typ, lane, tenant, group, n, now, factor)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  if not call('ZSCORE', of, group) then call('ZADD', of, now, group) end
  call('ZINCRBY', of, n * AGE_MS, group)
  if call('ZSCORE', B .. 'parked:' .. typ, tenant) then return end
  if factor then call('ZADD', B .. 'priority:' .. typ, rank(group, factor), group) end
  if not in_lane(typ, lane, tenant) then enter_lane(typ, lane, tenant) end
end
-- dequeue takes a group's waiting jobs of a type out of the fair queue; the jobs stay where they are.
local function dequeue(typ, lane, tenant, group)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  call('ZREM', B .. 'priority:' .. typ, group)
  if call('ZREM', of, group) == 0 or call('ZCARD', of) > 0 then return end
  local own = in_lane(typ, lane, tenant)
  if own then leave_lane(typ, lane, tenant, own) end
end

-- What is paused: a group says so itself, tenants and types are in one hash, which is empty nearly always.
local function any_paused() return call('HLEN', B .. 'pauses') > 0 end
local function is_paused(what, id) return call('HEXISTS', B .. 'pauses', what .. ':' .. id) == 1 end

-- FAR is when a paused tenant's parked jobs are due; it is later than any time, and an integer that a score holds exactly.
local FAR = 9007199254740991

-- park puts moving blobs, each behind its due time, into their tenant's non-ready set and keeps the index at the earliest.
local function see_park(tenant, typ)
  see('ZCARD', B .. 'non-ready', B .. 'non-ready:' .. tenant)
  see('HLEN', B .. 'load:' .. typ)
  see('LLEN', B .. 'wake:dispatcher')
end
local function park(tenant, typ, blobs)
  call('ZADD', B .. 'non-ready:' .. tenant, unpack(blobs))
  local due, first = blobs[1], call('ZSCORE', B .. 'non-ready', tenant)
  for i = 3, #blobs, 2 do due = math.min(due, blobs[i]) end
  if not first or due < tonumber(first) then
    call('ZADD', B .. 'non-ready', due, tenant)
    wake('dispatcher')
  end
  call('HINCRBY', B .. 'load:' .. typ, 'non_ready', #blobs / 2)
end

-- reindex sets a tenant's place among those with parked jobs to its earliest due time, or to not_before where that is later.
local function reindex(tenant, not_before)
  local first = call('ZRANGE', B .. 'non-ready:' .. tenant, 0, 0, 'WITHSCORES')
  if #first == 0 then
    call('ZREM', B .. 'non-ready', tenant)
    return
  end
  call('ZADD', B .. 'non-ready', math.max(tonumber(first[2]), not_before or 0), tenant)
end

-- parse reads the head of a moving blob; queued starts at its last value.
local function parse(blob)
  local group, typ, attempt, retries, throttles, losses, wf, wr, wc, since, reason, ordinal, accepted, trace, at =
    string.match(blob, '^([^|]*)|([^|]*)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%a?)|(%d+)|(%d+)|([^|]*)|()')
  if not group or #ordinal > 9 then return nil end -- beyond what a string of states can hold
  return {
    group = group, typ = typ, attempt = tonumber(attempt), retries = retries, throttles = throttles,
    losses = tonumber(losses), wf = tonumber(wf), wr = tonumber(wr), wc = tonumber(wc), since = tonumber(since), reason = reason,
    ordinal = tonumber(ordinal), accepted = tonumber(accepted), trace = trace, payload_at = at,
  }
end

-- entry_blob is a ready entry's blob: its only field is j with the blob as its value, or the blob's head with the rest, from the ordinal on. So what is queued is
-- handed on as it is: Lua hashes all of each string that it makes.
local function entry_blob(fields)
  if #fields ~= 2 then return (string.gsub(table.concat(fields, ' '), '|', '¦')) end -- no job
  return fields[1] == 'j' and fields[2] or fields[1] .. fields[2]
end

-- compose is parse's inverse; the payload is taken from the blob that was parsed.
local function compose(j, blob)
  return j.group .. '|' .. j.typ .. '|' .. j.attempt .. '|' .. j.retries .. '|' .. j.throttles .. '|' .. j.losses .. '|' ..
    j.wf .. '|' .. j.wr .. '|' .. j.wc .. '|' .. string.format('%.0f', j.since) .. '|' .. j.reason .. '|' .. j.ordinal .. '|' ..
    string.format('%.0f', j.accepted) .. '|' .. j.trace .. '|' .. string.sub(blob, j.payload_at)
end

-- mint gives the n-th span id of a script's run; seed is 8 random hex digits.
local function mint(seed, n) return seed .. string.format('%08x', n) end
local function follow(trace, span) return string.sub(trace, 1, 36) .. span .. string.sub(trace, 53) end

-- set_aside keeps what can't be read, bounded, for a person to look at.
local function set_aside(where, what)
  call('LPUSH', B .. 'garbage', where .. ' ' .. string.sub(what, 1, 1024))
  call('LTRIM', B .. 'garbage', 0, 999)
end

-- bury ends a job as failed: the error and the job for a later round, the code, and a dead letter.
local function see_bury(group)
  see('XLEN', B .. 'dead-letters')
  see('HLEN', B .. 'payloads:' .. group, B .. 'failures:' .. group, B .. 'errors:' .. group, B .. 'codes:' .. group)
end
local function bury(group, tenant, round, j, blob, code, message, now)
  local payload = string.sub(blob, j.payload_at)
  local err = cjson.encode({ ordinal = j.ordinal, code = code, error = message, attempts = j.attempt, at = now, round = round })
  if payload == '' then payload = call('HGET', B .. 'payloads:' .. group, tostring(j.ordinal)) or '' end
  call('XADD', B .. 'dead-letters', '*', 'job', group .. '.' .. j.ordinal, 'tenant', tenant, 'group', group, 'ordinal', j.ordinal,
    'type', j.typ, 'code', code, 'error', message, 'attempts', j.attempt, 'at', now, 'payload', payload)
  j.retries, j.throttles, j.losses, j.wf, j.wr, j.wc, j.since, j.reason = 0, 0, 0, 0, 0, 0, 0, ''
  call('HSET', B .. 'failures:' .. group, j.ordinal, err .. '\n' .. compose(j, blob))
  call('HDEL', B .. 'errors:' .. group, j.ordinal)
  call('HINCRBY', B .. 'codes:' .. group, code, 1)
end

-- check_end asks for attention when the last job of a sealed group has ended. It reads the ledger after it was written.
local function check_end(group)
  local g = call('HMGET', B .. 'group:' .. group, 'sealed', 'accepted', 'done', 'failed', 'cancelled')
  if g[1] and tonumber(g[2] or 0) <= (tonumber(g[3] or 0) + tonumber(g[4] or 0) + tonumber(g[5] or 0)) then attend(group) end
end
