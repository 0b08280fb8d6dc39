-- non_ready: non-ready jobs, in the sorted set non-ready:TENANT by due time (ms). The sorted set
-- non-ready orders the tenants by the time at which promote looks at them next: the due time of
-- their first job, or a later one.
-- NEEDS  base, signals
-- OFFERS
--   FAR                                  score of a paused tenant in the sorted set non-ready
--   precheck_non_ready(tenant, typ)      reads the keys that add_non_ready writes
--   add_non_ready(tenant, typ, blobs)    adds jobs of one type: {due time, moving blob, …}
--   reindex(tenant, not_before)          writes the tenant's score in non-ready again

-- FAR is the score of a paused tenant in non-ready, once promote has met it. It is later than any
-- time, and a score holds it and each lower integer exactly.
local FAR = 9007199254740991

-- add_non_ready adds moving blobs, each behind its due time, to their tenant's non-ready jobs, and
-- counts them in the type's field non_ready. If one of them is due earlier than the tenant's score
-- in non-ready, or the tenant has no score there, the earliest due time becomes the score, and the
-- dispatcher is woken. The caller writes states and counts.
local function precheck_non_ready(tenant, typ)
  precheck('ZCARD', B .. 'non-ready', B .. 'non-ready:' .. tenant)
  precheck('HLEN', B .. 'load:' .. typ)
  precheck('LLEN', B .. 'wake:dispatcher')
end
local function add_non_ready(tenant, typ, blobs)
  call('ZADD', B .. 'non-ready:' .. tenant, unpack(blobs))
  local due, first = blobs[1], call('ZSCORE', B .. 'non-ready', tenant)
  for i = 3, #blobs, 2 do due = math.min(due, blobs[i]) end
  if not first or due < tonumber(first) then
    call('ZADD', B .. 'non-ready', due, tenant)
    wake('dispatcher')
  end
  call('HINCRBY', B .. 'load:' .. typ, 'non_ready', #blobs / 2)
end

-- reindex sets a tenant's score in non-ready to the earliest due time of its jobs, or to not_before
-- if that is later. It removes a tenant without non-ready jobs from the sorted set.
local function reindex(tenant, not_before)
  local first = call('ZRANGE', B .. 'non-ready:' .. tenant, 0, 0, 'WITHSCORES')
  if #first == 0 then
    call('ZREM', B .. 'non-ready', tenant)
    return
  end
  call('ZADD', B .. 'non-ready', math.max(tonumber(first[2]), not_before or 0), tenant)
end
