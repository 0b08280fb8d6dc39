-- fair_queue: groups and tenants enter the fair queue and leave it.
-- NEEDS  base, priority
-- OFFERS
--   AGE_MS                                               age that counts as one waiting job, ms
--   precheck_enqueue(typ, lane, tenant)                  reads what enqueue and withdraw write
--   enter_lanes(typ, tenant, factor, absent)             adds a tenant to all lanes where it waits
--   leave_lane(typ, lane, tenant, tag, gen)              removes a tenant, and keeps its tag
--   in_lane(typ, lane, tenant)                           the tenant's start tag, or false
--   enqueue(typ, lane, tenant, group, n, now, factor, fresh)
--                                                        adds a group with n waiting jobs
--   waiting_by_type(group, types, lane, tenant)          waiting jobs: numbers, by type and in all
--   enqueue_all(waiting, lane, tenant, group, now, factor)
--                                                        adds a group with jobs of several types
--   withdraw(typ, lane, tenant, group)                   removes a group
-- factor is what alpha() returns: nil with the policy fair, under which groups have no priority.

-- A tenant's groups are ordered by their work left, with aging: the score of a group is the time at
-- which it entered (ms), plus AGE_MS for each waiting job. The lowest is next.
local AGE_MS = 100

local function precheck_enqueue(typ, lane, tenant)
  precheck('HLEN', B .. 'fair:' .. typ, B .. 'tenant:' .. tenant)
  precheck('ZCARD', B .. 'fair:' .. typ .. ':' .. lane, B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant)
  precheck('ZCARD', B .. 'over:' .. typ .. ':' .. lane, B .. 'rate-limited:' .. typ)
  precheck('ZCARD', B .. 'priority:' .. typ .. ':' .. lane)
end
-- enter_lane adds a tenant to a lane. Its start tag is its own one or the lane's virtual time,
-- whichever is later: a tenant neither gains nor loses by being idle. A tag is valid for one
-- generation of its type (field gen): retire ends a generation.
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
-- leave_lane removes a tenant from a lane and stores its start tag for its return. gen is the
-- type's generation; nil: leave_lane reads it.
local function leave_lane(typ, lane, tenant, tag, gen)
  gen = gen or call('HGET', B .. 'fair:' .. typ, 'gen') or '0'
  call('HSET', B .. 'tenant:' .. tenant, 'tag:' .. typ .. ':' .. lane, gen .. ' ' .. tag)
  if call('ZREM', B .. 'fair:' .. typ .. ':' .. lane, tenant) == 0 then
    call('ZREM', B .. 'over:' .. typ .. ':' .. lane, tenant)
  end
end
-- in_lane returns a tenant's start tag. It is in fair:TYPE:LANE while the tenant has permits, and
-- in over:TYPE:LANE while the tenant is borrowing. in_lane returns false for a tenant that is in
-- neither: it has no waiting jobs in the lane, or is rate-limited or paused.
local function in_lane(typ, lane, tenant)
  return call('ZSCORE', B .. 'fair:' .. typ .. ':' .. lane, tenant)
    or call('ZSCORE', B .. 'over:' .. typ .. ':' .. lane, tenant)
end

-- enter_lanes adds a tenant to each lane in which it has waiting jobs, and its groups to the order
-- by priority. absent says that the tenant is in no lane now; otherwise a lane that has it keeps
-- its tag.
local function enter_lanes(typ, tenant, factor, absent)
  for _, lane in ipairs(LANES) do
    local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
    if call('ZCARD', of) > 0 then
      if absent or not in_lane(typ, lane, tenant) then enter_lane(typ, lane, tenant) end
      for _, group in ipairs(factor and call('ZRANGE', of, 0, -1) or {}) do
        call('ZADD', B .. 'priority:' .. typ .. ':' .. lane, rank(group, factor), group)
      end
    end
  end
end

-- enqueue adds n waiting jobs of a group to its tenant's order of groups, and the tenant to the
-- lane; a rate-limited tenant enters the lane later (see admit). The caller adds the jobs to the
-- list queue:GROUP:TYPE. fresh: the group is new, so it is not in the order yet.
local function enqueue(typ, lane, tenant, group, n, now, factor, fresh)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  if not fresh and call('ZSCORE', of, group) then
    call('ZINCRBY', of, n * AGE_MS, group)
  else
    call('ZADD', of, now + n * AGE_MS, group)
  end
  -- What was empty at the precheck still is: of the scripts that call enqueue, none adds to these two.
  local limited, over = B .. 'rate-limited:' .. typ, B .. 'over:' .. typ .. ':' .. lane
  if prechecked[limited] ~= 0 and call('ZSCORE', limited, tenant) then return end
  if factor then call('ZADD', B .. 'priority:' .. typ .. ':' .. lane, rank(group, factor), group) end
  if call('ZSCORE', B .. 'fair:' .. typ .. ':' .. lane, tenant) then return end
  if prechecked[over] == 0 or not call('ZSCORE', over, tenant) then enter_lane(typ, lane, tenant) end
end
-- waiting_by_type returns the number of a group's waiting jobs, as a table by type and in all. It
-- also prechecks, for each type, the keys that enqueue and withdraw write: call it before the first
-- write. types is the field types of the group's hash, TYPE|TYPE|…
local function waiting_by_type(group, types, lane, tenant)
  local waiting, all = {}, 0
  for typ in string.gmatch(types or '', '[^|]+') do
    waiting[typ] = call('LLEN', B .. 'queue:' .. group .. ':' .. typ)
    all = all + waiting[typ]
    precheck_enqueue(typ, lane, tenant)
  end
  return waiting, all
end
local function enqueue_all(waiting, lane, tenant, group, now, factor)
  for typ, n in pairs(waiting) do
    if n > 0 then enqueue(typ, lane, tenant, group, n, now, factor) end
  end
end
-- withdraw removes a group from the fair queue of a type, and its tenant from the lane if this was
-- the tenant's last group there. The jobs stay in the list queue:GROUP:TYPE.
local function withdraw(typ, lane, tenant, group)
  local of = B .. 'fair:' .. typ .. ':' .. lane .. ':' .. tenant
  call('ZREM', B .. 'priority:' .. typ .. ':' .. lane, group)
  if call('ZREM', of, group) == 0 or call('ZCARD', of) > 0 then return end
  local tag = in_lane(typ, lane, tenant)
  if tag then leave_lane(typ, lane, tenant, tag) end
end
