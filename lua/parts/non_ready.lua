-- non_ready: jobs that wait for a time, in non-ready:TENANT by due time (ms). The sorted set
-- non-ready orders the tenants by the due time of their first job.
-- NEEDS  base, signals
-- OFFERS
--   FAR                                  due time of a paused tenant
--   precheck_non_ready(tenant, typ)      reads the keys that add_non_ready writes
--   add_non_ready(tenant, typ, blobs)    adds jobs
--   reindex(tenant, not_before)          writes the tenant's place in the order again

-- FAR is when a paused tenant's non-ready jobs are due; it is later than any time, and an integer that a score holds exactly.
local FAR = 9007199254740991

-- add_non_ready puts moving blobs, each behind its due time, into their tenant's non-ready set and keeps the index at the earliest.
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

-- reindex sets a tenant's place among those with non-ready jobs to its earliest due time, or to not_before where that is later.
local function reindex(tenant, not_before)
  local first = call('ZRANGE', B .. 'non-ready:' .. tenant, 0, 0, 'WITHSCORES')
  if #first == 0 then
    call('ZREM', B .. 'non-ready', tenant)
    return
  end
  call('ZADD', B .. 'non-ready', math.max(tonumber(first[2]), not_before or 0), tenant)
end
