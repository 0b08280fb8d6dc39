-- outcome: what came of jobs that a worker has run.  in flight → done, failed or non-ready; handed back unstarted: ready → ready
-- KEYS  base
-- ARGV  type, congestion base ms, congestion cap ms, permits a second of all tenants, n groups, then for each: group, n done, n others, then
--       for each done by ascending ordinal:  entry, ordinal, attempt, result line, trace, flag (m: has an error on record or a payload of its own)
--       for each other by ascending ordinal: entry, ordinal, attempt, kind, retries, throttles, losses, waits (f|r|c), queued blob, delay ms, code, message
--       kinds: r retry, t throttled by the partner (delay is Retry-After; -delay is the least where it said none), f failed for good, h handed back without an outcome, u handed back unstarted
-- Reply {owned, stale}; a stale outcome changes nothing; its entry goes too, unless it may be the one that holds the job by now
-- One entry of results per batch and group. Twice: the second call is stale as a whole. Goes through when memory is full. Cost: about 3 µs a job.
local typ, base, cap, rps, groups, arg = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), 6
local stream = B .. 'ready:' .. typ
local now, entries, owned, stale = now_ms(), {}, 0, 0
local since = string.format('%.0f', now)
see('XLEN', stream, B .. 'results')
see('SCARD', B .. 'active')
see_attend()
pass_oom()

-- The wait of a job that comes back (base + floor(non-ready of this tenant / its rate) * 1 s) is spread within the second by its place in the
-- line, which keeps the order; or what the caller asks for, where that is longer.
local rate = math.max(1, floor(rps / math.max(1, call('SCARD', B .. 'active'))))
local function congestion(n, delay)
  local wait = base
  if rps > 0 then wait = wait + floor(n / rate) * 1000 + floor((n % rate) * 1000 / rate) end
  return math.min(cap, math.max(wait, delay))
end

-- An entry is removed with its outcome. A stale one may be the entry of a later attempt (see start): while the job is ready or in flight
-- under another attempt, reclaim decides.
local function release(entry, live, state, m)
  if not live or string.sub(state, 2) == m or not string.find(state, '^[RI]') then entries[#entries + 1] = entry end
end

-- settle_done takes n done jobs of a group off ARGV and returns how many of them were owned.
local function settle_done(group, live, n)
  local ords, new, lines, traces, marked, first = {}, {}, {}, {}, {}, arg
  for i = 1, n do
    ords[i] = tonumber(ARGV[arg + 1])
    arg = arg + 6
  end
  local states, span = load_states(group, ords)
  for i = 1, n do
    local at = first + (i - 1) * 6
    local m = mark(tonumber(ARGV[at + 2]))
    release(ARGV[at], live, states[i], m)
    if live and states[i] == 'I' .. m then
      new[i], lines[#lines + 1] = 'D' .. m, ARGV[at + 3]
      if ARGV[at + 4] ~= '' then traces[#traces + 1] = ords[i] .. ' ' .. ARGV[at + 4] end
      if ARGV[at + 5] ~= '' then marked[#marked + 1] = ords[i] end
    end
  end
  if #lines == 0 then return 0 end
  if #marked > 0 then see('HLEN', B .. 'errors:' .. group, B .. 'payloads:' .. group) end
  call('XADD', B .. 'results', '*', 'g', group, 'l', table.concat(lines, '\n'), 't', table.concat(traces, '\n'))
  store_states(group, ords, new, span)
  if #marked > 0 then
    call('HDEL', B .. 'errors:' .. group, unpack(marked))
    call('HDEL', B .. 'payloads:' .. group, unpack(marked))
  end
  return #lines
end

-- settle_others does the same with n jobs that are not done. It returns how many have failed, were parked, and went back unstarted.
local function settle_others(group, live, tenant, round, n)
  local ords, new, blobs, errors, failed, readied, retries, first = {}, {}, {}, {}, 0, 0, 0, arg
  for i = 1, n do
    ords[i] = tonumber(ARGV[arg + 1])
    arg = arg + 12
  end
  local states, span = load_states(group, ords)
  local congested = 0
  if live then congested = math.max(0, tonumber(call('HGET', B .. 'tenant:' .. tenant, 'congested') or 0)) end
  for i = 1, n do
    local at = first + (i - 1) * 12
    local ordinal, attempt, kind, queued = ords[i], tonumber(ARGV[at + 2]), ARGV[at + 3], ARGV[at + 8]
    local delay, code, message = tonumber(ARGV[at + 9]), ARGV[at + 10], ARGV[at + 11]
    local state, m = states[i], mark(attempt)
    local counts = '|' .. ARGV[at + 4] .. '|' .. ARGV[at + 5] .. '|' .. ARGV[at + 6] .. '|' .. ARGV[at + 7] .. '|' .. since .. '|'
    local head = group .. '|' .. typ .. '|' .. attempt .. counts
    release(ARGV[at], live, state, m)
    -- Whether a start took effect whose answer was lost is known only here.
    if kind == 'u' and state == 'I' .. m then kind = 'h' end
    if live and state == (kind == 'u' and 'R' or 'I') .. m then
      if kind == 'f' then
        local blob = head .. '|' .. queued
        bury(group, tenant, round, parse(blob), blob, code, message, now)
        new[i], failed = 'F' .. m, failed + 1
      elseif kind == 'u' then
        call('XADD', stream, '*', 'j', group .. '|' .. typ .. '|' .. (attempt + 1) .. counts .. '|' .. queued)
        new[i], readied = 'R' .. mark(attempt + 1), readied + 1
      else
        local wait, reason = 0, kind == 't' and 'A' or 'E'
        if kind == 't' and delay > 0 then wait = delay elseif kind ~= 'h' then wait = congestion(congested + #blobs / 2, math.abs(delay)) end
        if kind ~= 'h' then
          errors[#errors + 1] = ordinal
          errors[#errors + 1] = cjson.encode({ ordinal = ordinal, code = code, error = message, attempts = attempt, at = now, ['until'] = now + wait, reason = reason })
        end
        if kind == 'r' then retries = retries + 1 end
        blobs[#blobs + 1] = now + wait
        blobs[#blobs + 1] = head .. reason .. '|' .. queued
        new[i] = 'N' .. m
      end
    end
  end
  local parked = #blobs / 2
  if parked > 0 then
    if #errors > 0 then call('HSET', B .. 'errors:' .. group, unpack(errors)) end
    park(tenant, typ, blobs)
    call('HINCRBY', B .. 'tenant:' .. tenant, 'congested', parked)
  end
  store_states(group, ords, new, span)
  add(B .. 'group:' .. group, 'retries', retries)
  return failed, parked, readied
end

for _ = 1, groups do
  local group, n_done, n_other = ARGV[arg], tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  arg = arg + 3
  local key = B .. 'group:' .. group
  local g = call('HMGET', key, 'tenant', 'status', 'round')
  local live, tenant = g[1] and g[2] ~= 'CANCELLED', g[1]
  local done, failed, parked, readied = 0, 0, 0, 0
  if live then see('HLEN', B .. 'tenant:' .. tenant) end
  if live and n_other > 0 then
    see_park(tenant, typ)
    see_bury(group)
  end
  if n_done > 0 then done = settle_done(group, live, n_done) end
  if n_other > 0 then failed, parked, readied = settle_others(group, live, tenant, tonumber(g[3]), n_other) end
  if done + failed + parked > 0 then
    add(key, 'in_flight', -done - failed - parked, 'done', done, 'failed', failed, 'non_ready', parked)
    if done + failed > 0 then
      call('HINCRBY', B .. 'tenant:' .. tenant, 'unfinished', -done - failed)
      check_end(group)
    end
  end
  owned = owned + done + failed + parked + readied
  stale = stale + n_done + n_other - done - failed - parked - readied
end
if #entries > 0 then
  call('XACK', stream, 'workers', unpack(entries))
  call('XDEL', stream, unpack(entries))
end
return { owned, stale }
