-- prelude: what every script begins with. KEYS[1] is the partition's base, e.g. "bulk-action:{0}:"; all
-- other keys are built from it and so share its slot.
--
-- A job is a blob that moves:  queued  = ordinal|accepted_ms|trace|payload
--                              moving  = group|type|attempt|retries|throttles|losses|wait_fair|wait_rate|wait_congestion|since|reason|queued
-- An empty payload lies in payloads:GROUP. Reasons: R rate limited, A throttled by the API, E transient error, S scheduled.
-- A job's state is two bytes in states:GROUP at twice its ordinal: a letter and the attempt (33 + attempt % 90).
-- Letters: W waiting, N non-ready, R ready, I in flight, D done, A done and reduced, F failed, C cancelled.
local B, call, floor = KEYS[1], redis.call, math.floor

local function now_ms()
  local t = call('TIME')
  return t[1] * 1000 + floor(t[2] / 1000)
end

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

-- attend asks the watcher to look at a group.
local function see_attend()
  see('SCARD', B .. 'attention')
  see('LLEN', B .. 'wake:watcher')
end
local function attend(group)
  call('SADD', B .. 'attention', group)
  wake('watcher')
end

-- activate counts n more (or fewer) jobs of a tenant that want a permit; a tenant is active while it has some.
local function see_activate(tenant)
  see('HLEN', B .. 'tenant:' .. tenant)
  see('SCARD', B .. 'active')
end
local function activate(tenant, n)
  if n == 0 then return end
  local left = call('HINCRBY', B .. 'tenant:' .. tenant, 'active', n)
  if left > 0 and left <= n then call('SADD', B .. 'active', tenant) end
  if left <= 0 then call('SREM', B .. 'active', tenant) end
end

-- Least remaining work with aging: each waiting job of a group counts as much as this age (ms).
local AGE_MS = 100

-- A tenant is given at most so many jobs in a row.
local PICK = 50

-- enqueue puts n waiting jobs' worth of a group into its tenant's fair queue, and the tenant into the lane.
-- A tenant that returns starts at max(own tag, the lane's virtual time): idling earns nothing and costs nothing. A tag that is further ahead than
-- one pick comes from a former life of the type (see retire).
local function see_enqueue(typ, lane, tenant)
  see('HLEN', B .. 'fair:' .. typ, B .. 'tenant:' .. tenant)
  see('ZCARD', B .. 'fair:' .. typ .. ':' .. lane, B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant, B .. 'parked:' .. typ)
end
local function enter_lane(typ, lane, tenant)
  local own = tonumber(call('HGET', B .. 'tenant:' .. tenant, 'tag:' .. typ .. ':' .. lane) or 0)
  local virtual = tonumber(call('HGET', B .. 'fair:' .. typ, 'v:' .. lane) or 0)
  call('ZADD', B .. 'fair:' .. typ .. ':' .. lane, math.max(virtual, math.min(own, virtual + PICK)), tenant)
end
local function leave_lane(typ, lane, tenant, own)
  call('HSET', B .. 'tenant:' .. tenant, 'tag:' .. typ .. ':' .. lane, own)
  call('ZREM', B .. 'fair:' .. typ .. ':' .. lane, tenant)
end
local function enqueue(typ, lane, tenant, group, n, now)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  if not call('ZSCORE', of, group) then call('ZADD', of, now, group) end
  call('ZINCRBY', of, n * AGE_MS, group)
  if call('ZSCORE', B .. 'fair:' .. typ .. ':' .. lane, tenant) or call('ZSCORE', B .. 'parked:' .. typ, tenant) then return end
  enter_lane(typ, lane, tenant)
end

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
  if not group then return nil end
  return {
    group = group, typ = typ, attempt = tonumber(attempt), retries = retries, throttles = throttles,
    losses = tonumber(losses), wf = tonumber(wf), wr = tonumber(wr), wc = tonumber(wc), since = tonumber(since), reason = reason,
    ordinal = tonumber(ordinal), accepted = tonumber(accepted), trace = trace, payload_at = at,
  }
end

-- compose is parse's inverse; the payload is taken from the blob that was parsed.
local function compose(j, blob)
  return j.group .. '|' .. j.typ .. '|' .. j.attempt .. '|' .. j.retries .. '|' .. j.throttles .. '|' .. j.losses .. '|' ..
    j.wf .. '|' .. j.wr .. '|' .. j.wc .. '|' .. string.format('%.0f', j.since) .. '|' .. j.reason .. '|' .. j.ordinal .. '|' ..
    string.format('%.0f', j.accepted) .. '|' .. j.trace .. '|' .. string.sub(blob, j.payload_at)
end

-- The limit `fixed`: at most R*w permits in any window of w ms that is aligned to the epoch. A clock that
-- steps back stays in the later window, so that no permit is given twice.
local function window(key, width, now)
  local w = call('HMGET', key, 'w', 'n')
  local cur, at = now - now % width, tonumber(w[1] or 0)
  if at >= cur then return at, tonumber(w[2] or 0) end
  return cur, 0
end
local function spend(key, at, n) call('HSET', key, 'w', string.format('%.0f', at), 'n', n) end

-- share is one tenant's part of the partition's permits a window.
local function share(permits) return math.max(1, floor(permits / math.max(1, call('SCARD', B .. 'active')))) end

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
