-- handout: how jobs of a type leave the fair queue, put behind the prelude where a script hands them out.
-- The script sets these once.
local typ, stream, fair, load_key, seed, now, by_group
local WAITING, match, byte, format = string.byte('W'), string.match, string.byte, string.format
local traced, traces = {}, 0 -- the sampled jobs among those that were handed out

-- next_group is the tenant's group with the least work left that really has a job, and how many.
local function next_group(lane, tenant)
  local of = fair .. ':' .. lane .. ':' .. tenant
  while true do
    local first = call('ZRANGE', of, 0, 0)
    if #first == 0 then return nil end
    local n = call('LLEN', B .. 'queue:' .. first[1] .. ':' .. typ)
    if n > 0 then return first[1], n end
    call('ZREM', of, first[1])
  end
end

-- take moves up to k jobs from the head of a group's queue. It returns how many went and how many left the queue.
local function take(group, k, place)
  local queue, key = B .. 'queue:' .. group .. ':' .. typ, B .. 'group:' .. group
  local popped = call('LRANGE', queue, 0, k - 1)
  local n, blobs, ords, accepted, traces, garbage = 0, {}, {}, {}, {}, {}
  for i = 1, #popped do
    local ordinal, at, trace = match(popped[i], '^(%d+)|(%d+)|([^|]*)|')
    if ordinal and #ordinal <= 9 then
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

-- waited divides a job's wait: since `bound` it was the rate that let nobody of the tenant through, before that it was others' turn.
local function waited(accepted, bound)
  local all = math.max(0, now - accepted)
  local rate = bound and math.max(0, math.min(all, now - bound)) or 0
  return all - rate, rate
end

-- traced_by tells of a traced job's admission, to wherever, and has the blob follow it.
local function traced_by(group, tenant, blob, ordinal, accepted, trace, fairness, rate)
  if trace == '' then return blob end
  traces = traces + 1
  local id = mint(seed, traces)
  for _, v in ipairs({ group, ordinal, tenant, trace, id, accepted, now, fairness, rate }) do traced[#traced + 1] = v end
  local front = ordinal .. '|' .. accepted .. '|'
  return front .. follow(trace, id) .. string.sub(blob, #front + #trace + 1)
end

-- Jobs that were taken in together have the same head, so it is put together once for them.
local function to_ready(group, tenant, bound)
  local head, to, head_attempt, head_accepted, fairness, rate
  return function(blob, ordinal, attempt, accepted, trace)
    if attempt ~= head_attempt or accepted ~= head_accepted then
      head_attempt, head_accepted, to = attempt, accepted, 'R' .. mark(attempt + 1)
      fairness, rate = waited(tonumber(accepted), bound)
      head = group .. '|' .. typ .. '|' .. (attempt + 1) .. '|0|0|0|' .. format('%.0f|%.0f|0|%.0f||', fairness, rate, now)
    end
    call('XADD', stream, '*', 'j', head .. traced_by(group, tenant, blob, ordinal, accepted, trace, fairness, rate))
    return to
  end
end

local function to_park(group, tenant, bound, due)
  return function(blob, ordinal, attempt, accepted, trace)
    local fairness, rate = waited(tonumber(accepted), bound)
    park(tenant, typ, { due, group .. '|' .. typ .. '|' .. attempt .. '|0|0|0|' .. format('%.0f|%.0f|0|%.0f|R|', fairness, rate, now) ..
      traced_by(group, tenant, blob, ordinal, accepted, trace, fairness, rate) })
    return 'N' .. mark(attempt)
  end
end

-- settle writes the ledger after a take and lets an emptied group go.
-- It says whether the tenant has no other group in the lane.
local function settle(group, of, field, went, gone, n)
  add(B .. 'group:' .. group, 'waiting', -went, field, went)
  call('HINCRBY', load_key, 'waiting', -gone)
  if gone < n then
    call('ZINCRBY', of, -gone * AGE_MS, group)
    return false
  end
  call('ZREM', of, group)
  if by_group then call('ZREM', B .. 'priority:' .. typ, group) end
  return call('ZCARD', of) == 0
end
