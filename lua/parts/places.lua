-- places: the bound of a tenant's jobs in flight. A tenant with a bound has the field in_flight in its
-- hash, and in the field places how many entries of ready streams its jobs have. The script that adds
-- an entry counts it, and so does the one that removes it; nobody counts for other tenants. A tenant
-- at its bound leaves its lanes, as if it were rate-limited, and promote passes it over; the field held
-- says where it is to come back: types, and * for its due jobs.
-- NEEDS  base, signals
-- OFFERS
--   HELD_MS                        after this time a tenant at its bound is looked at again in any case
--   hold(key, held, what)          notes that a tenant is to come back
--   free_places(tenant, n)         counts n entries less; nothing for a tenant without a bound
--   free_known(tenant, n, t)       the same; t has the fields in_flight, places and held
--   come_back(tenant, held)        lets a tenant be looked at again at once, as its field held says
--   entries_of(tenant, only)       how many entries a tenant's jobs, or those of a group, have in the
--                                  ready streams

local HELD_MS = 1000

-- hold adds `what`, a type or *, to the field held of the tenant's hash (key), whose value it was.
local function hold(key, held, what)
  if not string.find('|' .. (held or '') .. '|', '|' .. what .. '|', 1, true) then
    call('HSET', key, 'held', (held and held .. '|' or '') .. what)
  end
end

local function come_back(tenant, held)
  call('HDEL', B .. 'tenant:' .. tenant, 'held')
  for what in string.gmatch(held, '[^|]+') do
    if what == '*' then
      if call('ZSCORE', B .. 'non-ready', tenant) then call('ZADD', B .. 'non-ready', now_ms(), tenant) end
      wake('dispatcher')
    elseif call('ZSCORE', B .. 'rate-limited:' .. what, tenant) then
      call('ZADD', B .. 'rate-limited:' .. what, 0, tenant)
    end
  end
  wake('fetcher')
end
local function free_known(tenant, n, t)
  if not t[1] or n == 0 then return end
  call('HSET', B .. 'tenant:' .. tenant, 'places', math.max(0, tonumber(t[2] or 0) - n))
  -- A key of a wrong type must not stop a script that has written: the tenant then waits for HELD_MS.
  if t[3] then pcall(come_back, tenant, t[3]) end
end
local function free_places(tenant, n)
  if n > 0 then free_known(tenant, n, call('HMGET', B .. 'tenant:' .. tenant, 'in_flight', 'places', 'held')) end
end

-- entries_of reads all ready streams, which are short.
local function entries_of(tenant, only)
  local n, owner = 0, {}
  for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do
    for _, entry in ipairs(call('XRANGE', B .. 'ready:' .. typ, '-', '+')) do
      local fields = entry[2]
      local group = string.match(fields[1] == 'j' and fields[2] or fields[1], '^[^|]+')
      if group and (not only or group == only) then
        if owner[group] == nil then owner[group] = call('HGET', B .. 'group:' .. group, 'tenant') end
        if owner[group] == tenant then n = n + 1 end
      end
    end
  end
  return n
end
