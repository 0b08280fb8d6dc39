-- lifecycle: moves a group through its states as far as its counts allow.
-- NEEDS  base, signals, tenants
-- OFFERS
--   load_group(group)             the group's hash, as a table and as a list; without a status there
--                                 is no group
--   precheck_move()               reads the partition's keys that move writes. Groups that may end
--                                 need precheck_last, too
--   move(group, g, hash, changes, now, early)
--                                 makes all transitions; their number, and how many failures must
--                                 be reduced before the group can end

local function load_group(group)
  local hash, g = call('HGETALL', B .. 'group:' .. group), {}
  for i = 1, #hash, 2 do g[hash[i]] = hash[i + 1] end
  return g, hash
end

local function precheck_move()
  precheck('ZCARD', B .. 'open', B .. 'ended', B .. 'failed')
  precheck_announce()
end

-- move makes the transitions CREATED → DISPATCHED → RUNNING → AGGREGATING → COMPLETED or FAILED that
-- a group's counts allow; if early is true, only the first two. g and hash are what load_group
-- returned, g with what the caller has changed; changes has these fields and values in turn: move
-- writes them to Redis, together with its own. Each transition is timestamped, never
-- before the last one: Redis's clock may go back. The events share one entry of the outbox. Its copy
-- of the hash is hash with the changes behind it: the last value of a field is valid. When a group
-- ends, it is not paused any more; if its tenant has neither unfinished nor non-ready jobs then, the
-- tenant becomes inactive, and its counters are reset (check_last).
local function move(group, g, hash, changes, now, early)
  local key, moves, failures, ended = B .. 'group:' .. group, {}, 0, false
  local function n(field) return tonumber(g[field] or 0) end
  local function set(field, value)
    g[field] = value
    changes[#changes + 1], changes[#changes + 2] = field, value
  end
  local made, failed, all_ended, at = 0, n('failed'), n('done') + n('failed') + n('cancelled') >= n('accepted'), nil
  while g.status do
    local status, to = g.status, nil
    local unreduced = g.reduce_failures and n('failures_reduced') ~= failed
    if status == 'CREATED' and g.sealed and not g.requeue then
      to = 'DISPATCHED'
    elseif status == 'DISPATCHED' and (g.started or all_ended) then
      to = 'RUNNING'
    elseif status == 'RUNNING' and all_ended and not g.requeue then
      to = 'AGGREGATING'
    elseif status == 'CANCELLED' and not g.sweep and unreduced then
      failures = failed
    elseif status == 'AGGREGATING' and n('reduced') >= n('done') then
      local too_many = failed > 0 and failed / n('accepted') >= tonumber(g.failure_threshold or 1)
      if unreduced then failures = failed else to = too_many and 'FAILED' or 'COMPLETED' end
    end
    if not to or early and to ~= 'DISPATCHED' and to ~= 'RUNNING' then break end
    at = string.format('%.0f', math.max(now, n('at:' .. string.lower(status))))
    set('status', to)
    set('at:' .. string.lower(to), at)
    made, moves[#moves + 1], moves[#moves + 2] = made + 1, to, at
    ended = to == 'COMPLETED' or to == 'FAILED'
  end
  if #moves > 0 then
    for i = 1, #changes do hash[#hash + 1] = changes[i] end
    announce(group, g.round, moves, hash)
  end
  if #changes > 0 then call('HSET', key, unpack(changes)) end
  if ended then
    call('ZREM', B .. 'open', group)
    if g.paused then call('HDEL', key, 'paused') end
    call('ZADD', B .. 'ended', at, group)
    if g.status == 'FAILED' then call('ZADD', B .. 'failed', at, group) end
    check_last(g.tenant)
  end
  return made, failures
end
