-- start: a worker begins jobs that it has read.  ready → in flight
-- KEYS  base
-- ARGV  type, n groups, then for each: group, n jobs, then for each job by ascending ordinal: entry, ordinal, attempt
-- Reply {tokens in the order of ARGV, groups}: a token is the attempt to report under, or -1 not to be run: the entry is stale.
--       Its entry goes, unless the job is ready or in flight: then reclaim decides whose entry it is. groups: {tenant, job timeout ms, max retries} of each group, '' = default.
-- The state's letter and attempt are the fence: whoever holds the attempt that stands there owns the job. An entry that comes again under
-- its old id (the consumer group was lost and made anew) gets a new attempt, so that an earlier holder is stale from then on.
-- Twice: the second call gives a new attempt. Goes through when memory is full. Cost: under 1 µs a job.
local typ, groups, arg = ARGV[1], tonumber(ARGV[2]), 3
local stream = B .. 'ready:' .. typ
local now, tokens, about, gone = now_ms(), {}, {}, {}
see('XLEN', stream)
see_attend()
pass_oom()
for _ = 1, groups do
  local group, n = ARGV[arg], tonumber(ARGV[arg + 1])
  arg = arg + 2
  local key, entries, ords, attempts = B .. 'group:' .. group, {}, {}, {}
  for i = 1, n do
    entries[i], ords[i], attempts[i] = ARGV[arg], tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
    arg = arg + 3
  end
  local g = call('HMGET', key, 'status', 'started', 'tenant', 'job_timeout', 'max_retries')
  local states, span = load_states(group, ords)
  local new, begun = {}, 0
  for i = 1, n do
    local state, token = states[i], -1
    if g[1] and g[1] ~= 'CANCELLED' then
      local mine = mark(attempts[i])
      if state == 'R' .. mine then
        token, begun = attempts[i], begun + 1
      elseif state == 'I' .. mine then
        token = attempts[i] + 1
      end
    end
    if token >= 0 then
      new[i] = 'I' .. mark(token)
    elseif not g[1] or g[1] == 'CANCELLED' or not string.find(state, '^[RI]') then
      gone[#gone + 1] = entries[i]
    end
    tokens[#tokens + 1] = token
  end
  store_states(group, ords, new, span)
  if begun > 0 then
    add(key, 'ready', -begun, 'in_flight', begun)
    if not g[2] then
      call('HSET', key, 'started', now)
      attend(group)
    end
  end
  about[#about + 1] = { g[3] or '', g[4] or '', g[5] or '' }
end
if #gone > 0 then
  call('XACK', stream, 'workers', unpack(gone))
  call('XDEL', stream, unpack(gone))
end
return { tokens, about }
