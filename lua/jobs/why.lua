-- why: reads what a job waits for, or the next waiting job of a group. It changes nothing.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group    -  the group's id
--   2  ordinal  n  the job; -1 = the next waiting job: the one with the lowest ordinal at the
--                  heads of the group's queues
--   3  most     n  most types, and most groups before this one, that the script looks at
-- Reply
--   {'NOGROUP'}  there is no such group
--   {'NOJOB'}    the group has no such job
--   {'OK', …}    the job:
--     2   now            ms      Redis time
--     3   state          -       state letter, '' = no job waits
--     4   ordinal        n       the job, -1 = no job waits
--     5   tenant         -       its tenant
--     6   status         -       status of its group
--     7   typ            -       its type, '' = only its blob says it
--     8   paused         -       what is paused: g group, t tenant, y type, or several of them
--     9   held           ms      run_at of the group while it is scheduled, 0 = it is not
--     10  limited_until  ms      until then its tenant is rate-limited for its type; 0 = it is not,
--                                or the job is not waiting
--     11  place          n       its position in its queue, from 0; -1 = not known
--     12  before         groups  groups of its lane that are served before its own: of its tenant,
--                                or with by_priority of all tenants
--     13  jobs           jobs    waiting jobs of these groups (of at most `most`), of its type
--     14  by_priority    0|1     priority orders the groups of a lane
--     15  started        ms      when the first job of the round started, 0 = none has
--     16  ended          jobs    jobs of the group that have ended
--     17  accepted       jobs    all jobs of the group
--     18  non_ready      jobs    non-ready jobs of the group
--     19  ready          jobs    ready jobs of the group
--     20  in_flight      jobs    its jobs in flight
--     21  types          -       {type, …} of the group
--     22  key            -       its key, '' = none, or its position is not known
-- The script finds a waiting job in its queue by bisection, because appends add jobs in the order
-- of their ordinals. It may not find a job that a later round has put there.
-- Twice: the second call answers again.
-- Out of memory: goes through.
-- Cost: some commands for each type and each group before this one.
local group, ordinal, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local g = call('HMGET', B .. 'group:' .. group, 'tenant', 'status', 'type', 'lane', 'paused', 'types', 'started',
  'done', 'failed', 'cancelled', 'accepted', 'non_ready', 'ready', 'in_flight')
if not g[1] then return { 'NOGROUP' } end
local tenant, lane = g[1], g[4] or 'normal'
local types = {}
for typ in string.gmatch(g[6] or '', '[^|]+') do
  if #types < most then types[#types + 1] = typ end
end

-- number_at returns the ordinal of an element of a queue.
local function number_at(typ, i)
  local number = string.match(call('LINDEX', B .. 'queue:' .. group .. ':' .. typ, i) or '', '^(%d+)|')
  return number and tonumber(number)
end

-- find returns the type and the position (from 0) of the job in the queues of its group. If it is
-- not found, the position is -1, and the type is '' unless the group has only one.
local function find()
  for _, typ in ipairs(types) do
    local lo, hi = 0, call('LLEN', B .. 'queue:' .. group .. ':' .. typ) - 1
    while lo <= hi do
      local mid = floor((lo + hi) / 2)
      local at = number_at(typ, mid)
      if not at then break end
      if at == ordinal then return typ, mid end
      if at < ordinal then lo = mid + 1 else hi = mid - 1 end
    end
  end
  return #types == 1 and types[1] or '', -1
end

local state, typ, place = '', #types == 1 and types[1] or '', -1
if ordinal < 0 then
  for _, t in ipairs(types) do
    local first = number_at(t, 0)
    if first and (ordinal < 0 or first < ordinal) then state, typ, place, ordinal = 'W', t, 0, first end
  end
else
  state = string.sub(call('GETRANGE', B .. 'states:' .. group, ordinal * 2, ordinal * 2 + 1), 1, 1)
  if state == '' then return { 'NOJOB' } end
  if state == 'W' then typ, place = find() end
end

local blob = place >= 0 and call('LINDEX', B .. 'queue:' .. group .. ':' .. typ, place) or ''
local job_key = string.match(blob or '', '\31([^\31]*)\31') or ''
local paused = g[5] and g[5] ~= '' and 'g' or ''
if call('HEXISTS', B .. 'pauses', 't:' .. tenant) == 1 then paused = paused .. 't' end
if typ ~= '' and call('HEXISTS', B .. 'pauses', 'y:' .. typ) == 1 then paused = paused .. 'y' end
local before, jobs, limited_until = 0, 0, nil
local by_priority = alpha() and 1 or 0
if state == 'W' and typ ~= '' then
  limited_until = call('ZSCORE', B .. 'rate-limited:' .. typ, tenant)
  local order, rank_of, range_of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant, 'ZRANK', 'ZRANGE'
  if by_priority == 1 then
    order, rank_of, range_of = B .. 'priority:' .. typ .. ':' .. lane, 'ZREVRANK', 'ZREVRANGE'
  end
  before = call(rank_of, order, group) or 0
  for _, other in ipairs(before > 0 and call(range_of, order, 0, math.min(before, most) - 1) or {}) do
    jobs = jobs + call('LLEN', B .. 'queue:' .. other .. ':' .. typ)
  end
end
local n = function(i) return tonumber(g[i] or 0) or 0 end
return { 'OK', now_ms(), state, ordinal, tenant, g[2] or '', typ, paused,
  call('ZSCORE', B .. 'scheduled', group) or 0, limited_until or 0, place, before, jobs, by_priority,
  n(7), n(8) + n(9) + n(10), n(11), n(12), n(13), n(14), types, job_key }
