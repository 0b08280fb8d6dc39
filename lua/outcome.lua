-- outcome: what came of jobs that a worker has run.  in flight → done, failed or non-ready; handed back unstarted: ready → ready
-- KEYS  base
-- ARGV  type, congestion base ms, congestion cap ms, permits a second of all tenants, n groups, then for each: group, n done, n others, then
--       for each done by ascending ordinal:  entry, ordinal, attempt, result line, trace, flags (e: has an error on record, p: has a payload of its own)
--       for each other by ascending ordinal: entry, ordinal, attempt, kind, retries, throttles, losses, waits (f|r|c), queued blob, delay ms, code, message
--       kinds: r retry, t throttled by the partner (delay is Retry-After; -delay is the least where it said none), f failed for good, h handed back without an outcome, u handed back unstarted
-- Reply {owned, stale}; a stale outcome changes nothing; its entry goes too, unless it may be the one that holds the job by now
-- One entry of results per batch and group. Twice: the second call is stale as a whole. Goes through when memory is full. Cost: about 3 µs a job.
local typ, base, cap, rps, groups, arg = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), 6
local stream = B .. 'ready:' .. typ
local now, entries, owned, stale = now_ms(), {}, 0, 0
call('XLEN', stream)
call('XLEN', B .. 'results')
call('XLEN', B .. 'dead-letters')
call('ZCARD', B .. 'non-ready')
pass_oom()

-- The wait of a job that comes back (base + floor(non-ready of this tenant / its rate) * 1 s) is spread within the second by its place in the
-- line, which keeps the order; or what the caller asks for, where that is longer.
local function congestion(tenant, delay)
  local rate = math.max(1, floor(rps / math.max(1, call('SCARD', B .. 'active'))))
  local n = math.max(0, tonumber(call('HGET', B .. 'tenant:' .. tenant, 'congested') or 0))
  local wait = base
  if rps > 0 then wait = wait + floor(n / rate) * 1000 + floor((n % rate) * 1000 / rate) end
  return math.min(cap, math.max(wait, delay))
end

-- An entry is removed with its outcome. A stale one may be the entry of a later attempt (see start): while the job is ready or in flight
-- under another attempt, reclaim decides.
local function release(entry, live, state, m)
  if not live or string.sub(state, 2) == m or not string.find(state, '^[RI]') then entries[#entries + 1] = entry end
end

for _ = 1, groups do
  local group, n_done, n_other = ARGV[arg], tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
  arg = arg + 3
  local key = B .. 'group:' .. group
  local g = call('HMGET', key, 'tenant', 'status')
  local live = g[1] and g[2] ~= 'CANCELLED'
  local tenant, done, failed, parked, readied, unstarted = g[1], 0, 0, 0, 0, 0
  if n_done > 0 then
    local ords, first = {}, arg
    for i = 1, n_done do
      ords[i] = tonumber(ARGV[arg + 1])
      arg = arg + 6
    end
    local states, span = load_states(group, ords)
    local new, lines, traces = {}, {}, {}
    for i = 1, n_done do
      local at = first + (i - 1) * 6
      local m = mark(tonumber(ARGV[at + 2]))
      release(ARGV[at], live, states[i], m)
      if live and states[i] == 'I' .. m then
        done = done + 1
        new[i], lines[done] = 'D' .. m, ARGV[at + 3]
        if ARGV[at + 4] ~= '' then traces[#traces + 1] = ords[i] .. ' ' .. ARGV[at + 4] end
        if ARGV[at + 5] ~= '' then
          call('HDEL', B .. 'errors:' .. group, ords[i])
          call('HDEL', B .. 'payloads:' .. group, ords[i])
        end
      end
    end
    if done > 0 then
      call('XADD', B .. 'results', '*', 'g', group, 'l', table.concat(lines, '\n'), 't', table.concat(traces, '\n'))
      store_states(group, ords, new, span)
    end
    owned, stale = owned + done, stale + n_done - done
  end
  for _ = 1, n_other do
    local entry, ordinal, attempt, kind = ARGV[arg], tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2]), ARGV[arg + 3]
    local queued, delay, code, message = ARGV[arg + 8], tonumber(ARGV[arg + 9]), ARGV[arg + 10], ARGV[arg + 11]
    local reason, m = kind == 't' and 'A' or 'E', mark(attempt)
    local head = group .. '|' .. typ .. '|' .. attempt .. '|' .. ARGV[arg + 4] .. '|' .. ARGV[arg + 5] .. '|' .. ARGV[arg + 6] .. '|' .. ARGV[arg + 7] .. '|' .. string.format('%.0f', now) .. '|'
    arg = arg + 12
    local state = call('GETRANGE', B .. 'states:' .. group, ordinal * 2, ordinal * 2 + 1)
    release(entry, live, state, m)
    -- Whether a start took effect whose answer was lost is known only here.
    if kind == 'u' and state == 'I' .. m then kind = 'h' end
    if live and state == (kind == 'u' and 'R' or 'I') .. m then
      owned = owned + 1
      local to
      if kind == 'f' then
        local blob = head .. '|' .. queued
        bury(group, tenant, parse(blob), blob, code, message, now)
        to, failed = 'F' .. m, failed + 1
      elseif kind == 'u' then
        call('XADD', stream, '*', 'j', group .. '|' .. typ .. '|' .. (attempt + 1) .. string.sub(head, #group + #typ + #tostring(attempt) + 3) .. '|' .. queued)
        to, unstarted = 'R' .. mark(attempt + 1), unstarted + 1
      else
        local wait = 0
        if kind == 't' and delay > 0 then wait = delay elseif kind ~= 'h' then wait = congestion(tenant, math.abs(delay)) end
        if kind ~= 'h' then
          call('HSET', B .. 'errors:' .. group, ordinal, cjson.encode({ ordinal = ordinal, code = code, error = message, attempts = attempt, at = now, ['until'] = now + wait, reason = reason }))
        end
        park(tenant, typ, now + wait, head .. reason .. '|' .. queued)
        call('HINCRBY', B .. 'tenant:' .. tenant, 'congested', 1)
        if kind == 'r' then call('HINCRBY', key, 'retries', 1) end
        to, parked = 'N' .. m, parked + 1
      end
      call('SETRANGE', B .. 'states:' .. group, ordinal * 2, to)
    else
      stale = stale + 1
    end
  end
  if done + failed + parked > 0 then
    add(key, 'in_flight', -done - failed - parked, 'done', done, 'failed', failed, 'non_ready', parked)
    if done + failed > 0 then
      call('HINCRBY', B .. 'tenant:' .. tenant, 'unfinished', -done - failed)
      check_end(group)
    end
  end
end
if #entries > 0 then
  call('XACK', stream, 'workers', unpack(entries))
  call('XDEL', stream, unpack(entries))
end
return { owned, stale }
