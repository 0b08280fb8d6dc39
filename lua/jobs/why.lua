-- why: looks at one job, or at the next one of a group, to tell what it waits for. It changes nothing.
-- KEYS  base
-- ARGV  group, ordinal (-1 = the next that waits), most types and most groups before it that are looked at
-- Reply {'NOGROUP'} | {'NOJOB'} |
--       {'OK', now, state ('' = nothing waits), ordinal, tenant, status, type ('' = only its blob tells), what is paused (of g, t and y),
--        held until (0: it is not held), until when its tenant is rate-limited (0: it is not), place in its queue (-1 = unknown),
--        groups before its own, jobs of these, 1 when groups are chosen by priority, started ms, ended, accepted, {count by state, …}, {type, …}}
-- A waiting job is found in its queue by bisection, for appends come in the order of ordinals; what a later round has put there may escape.
-- Twice: it answers again. Goes through when memory is full. Cost: a few commands for each type and group.
local group, ordinal, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local g = call('HMGET', B .. 'group:' .. group, 'tenant', 'status', 'type', 'lane', 'paused', 'types', 'started', 'done', 'failed', 'cancelled',
  'accepted', 'non_ready', 'ready', 'in_flight')
if not g[1] then return { 'NOGROUP' } end
local tenant, lane = g[1], g[4] or 'normal'
local types = {}
for typ in string.gmatch(g[6] or '', '[^|]+') do
  if #types < most then types[#types + 1] = typ end
end
local function number_at(typ, i)
  local number = string.match(call('LINDEX', B .. 'queue:' .. group .. ':' .. typ, i) or '', '^(%d+)|')
  return number and tonumber(number)
end

-- find looks for a job in the queues of its group.
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

local paused = g[5] and g[5] ~= '' and 'g' or ''
if call('HEXISTS', B .. 'pauses', 't:' .. tenant) == 1 then paused = paused .. 't' end
if typ ~= '' and call('HEXISTS', B .. 'pauses', 'y:' .. typ) == 1 then paused = paused .. 'y' end
local before, jobs, limited_until = 0, 0, nil
local by_priority = alpha() and 1 or 0
if state == 'W' and typ ~= '' then
  limited_until = call('ZSCORE', B .. 'rate-limited:' .. typ, tenant)
  local order, rank_of, range_of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant, 'ZRANK', 'ZRANGE'
  if by_priority == 1 then order, rank_of, range_of = B .. 'priority:' .. typ, 'ZREVRANK', 'ZREVRANGE' end
  before = call(rank_of, order, group) or 0
  for _, other in ipairs(before > 0 and call(range_of, order, 0, math.min(before, most) - 1) or {}) do
    jobs = jobs + call('LLEN', B .. 'queue:' .. other .. ':' .. typ)
  end
end
local n = function(i) return tonumber(g[i] or 0) or 0 end
return { 'OK', now_ms(), state, ordinal, tenant, g[2] or '', typ, paused, call('ZSCORE', B .. 'scheduled', group) or 0, limited_until or 0, place,
  before, jobs, by_priority, n(7), n(8) + n(9) + n(10), n(11), { n(12), n(13), n(14) }, types }
