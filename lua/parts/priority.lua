-- priority: the order of groups with FAIR_QUEUE_POLICY=priority.
-- NEEDS  base
-- OFFERS
--   LANES                             the names of the lanes
--   alpha()                           ALPHA, or nil with FAIR_QUEUE_POLICY=fair
--   rank(group, factor)               the priority of a group, and its lane; factor is ALPHA
--   precheck_rerank(types, factor)    reads the keys that rerank writes
--   rerank(group, types, factor)      computes the priority of a group again, if it has one

-- With FAIR_QUEUE_POLICY=priority the key policy holds ALPHA, and the sorted set
-- priority:TYPE:LANE orders the groups of all tenants by
--   priority = -created_ms + base_priority + ALPHA * (-1 + total / max(1, total - done))
-- The group with the highest priority is next. base_priority is the sum of the group's and its
-- tenant's. total is the announced number of jobs, or the accepted one if that is higher. done is
-- the number of done and failed jobs. Scripts that change done, the accepted jobs or base_priority
-- call rerank; seal, which may announce a total, and repair don't. rerank writes to the orders of
-- those types that have the group already, and does nothing if factor is nil.
local LANES = { 'high', 'normal', 'low' }
local function alpha() return tonumber(call('GET', B .. 'policy') or nil) end
local function rank(group, factor)
  local g = call('HMGET', B .. 'group:' .. group, 'at:created', 'base_priority', 'total', 'accepted', 'done',
    'failed', 'tenant', 'lane')
  local base = call('HGET', B .. 'tenant:' .. (g[7] or ''), 'base_priority')
  local total, done = math.max(tonumber(g[3] or 0), tonumber(g[4] or 0)), tonumber(g[5] or 0) + tonumber(g[6] or 0)
  local progress = -1 + total / math.max(1, total - done)
  return -tonumber(g[1] or 0) + tonumber(g[2] or 0) + tonumber(base or 0) + factor * progress, g[8] or 'normal'
end
local function precheck_rerank(types, factor)
  if not factor then return end
  for typ in string.gmatch(types or '', '[^|]+') do
    for _, lane in ipairs(LANES) do precheck('ZCARD', B .. 'priority:' .. typ .. ':' .. lane) end
  end
end
local function rerank(group, types, factor)
  if not factor then return end
  local score, lane = rank(group, factor)
  for typ in string.gmatch(types or '', '[^|]+') do
    call('ZADD', B .. 'priority:' .. typ .. ':' .. lane, 'XX', score, group)
  end
end
