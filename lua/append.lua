-- append: jobs enter a group.  (nothing) → waiting, or non-ready until their run_at
-- KEYS  base
-- ARGV  group, request id ('' = none; @ENTRY = an entry of the ingest stream), limit of jobs a group,
--       '' | 'last' of a submission | 'seal' last, and no more jobs come,
--       then for each job: type ('' = the group's), run_at ms (0 = at once), trace, payload
-- Reply {'OK', first ordinal, n} | {'DUP'} this request was applied before | {'NOGROUP'} | {'SEALED', status} |
--       {'TOTAL', total, accepted} more jobs than announced | {'LIMIT', accepted}
-- Twice with a request id: the second call answers DUP. Refused when memory is full (the first write is RPUSH, HSET or ZADD). Cost: a few µs a job.
local LARGE = 4096
local group, request, limit, mode = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local key, arg = B .. 'group:' .. group, 5
-- Entries of the ingest stream come again only while they are pending there, so they are remembered apart and for less long.
local entry_ms = string.match(request, '^@(%d+)%-')
local seen = B .. (entry_ms and 'entries' or 'messages')
local g = call('HMGET', key, 'tenant', 'type', 'lane', 'status', 'accepted', 'sealed', 'total', 'run_at', 'types', 'submitted')
if not g[1] then return { 'NOGROUP' } end
if mode ~= '' and g[10] then return { 'DUP' } end
if request ~= '' and call('ZSCORE', seen, request) then return { 'DUP' } end
local tenant, group_type, lane, status, accepted, total = g[1], g[2], g[3], g[4], tonumber(g[5] or 0), tonumber(g[7])
if g[6] or status == 'CANCELLED' then return { 'SEALED', status } end
local n = (#ARGV - arg + 1) / 4
if total and accepted + n > total then return { 'TOTAL', total, accepted } end
if accepted + n > limit then return { 'LIMIT', accepted } end

local now = now_ms()
local group_run_at = tonumber(g[8] or 0)
-- A group stays held until schedule releases it, so that its jobs are counted as active once.
local held = group_run_at > 0 and (group_run_at > now or call('ZSCORE', B .. 'scheduled', group) ~= false)
local queues, order, states, later, large, waiting = {}, {}, {}, {}, {}, 0
for i = 0, n - 1 do
  local at = arg + i * 4
  local typ, run_at, trace, payload = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  if typ == '' then typ = group_type end
  if #payload > LARGE then
    large[#large + 1] = accepted + i
    large[#large + 1] = payload
    payload = ''
  end
  local queued = (accepted + i) .. '|' .. string.format('%.0f', now) .. '|' .. trace .. '|' .. payload
  if run_at > now and run_at > group_run_at then
    states[i + 1] = 'N!'
    later[#later + 1] = { typ, run_at, group .. '|' .. typ .. '|0|0|0|0|0|0|0|' .. string.format('%.0f', now) .. '|S|' .. queued }
  else
    states[i + 1] = 'W!'
    waiting = waiting + 1
    local q = queues[typ]
    if not q then
      q = {}
      queues[typ] = q
      order[#order + 1] = typ
    end
    q[#q + 1] = queued
  end
end
call('STRLEN', B .. 'states:' .. group)
call('ZCARD', B .. 'non-ready:' .. tenant)
for _, typ in ipairs(order) do call('LLEN', B .. 'queue:' .. group .. ':' .. typ) end

if #large > 0 then call('HSET', B .. 'payloads:' .. group, unpack(large)) end
local types = g[9] or ''
local function serves(typ)
  if not string.find('|' .. types .. '|', '|' .. typ .. '|', 1, true) then
    types = types == '' and typ or types .. '|' .. typ
    call('HSET', key, 'types', types)
  end
  if not call('ZSCORE', B .. 'types', typ) then call('ZADD', B .. 'types', now, typ) end
end
for _, typ in ipairs(order) do
  local q = queues[typ]
  call('RPUSH', B .. 'queue:' .. group .. ':' .. typ, unpack(q))
  serves(typ)
  call('HINCRBY', B .. 'load:' .. typ, 'waiting', #q)
  if not held then
    enqueue(typ, lane, tenant, group, #q, now)
  end
end
if held then
  call('ZADD', B .. 'scheduled', group_run_at, group)
  wake('dispatcher')
end
for _, l in ipairs(later) do
  park(tenant, l[1], l[2], l[3])
  serves(l[1])
end
if n > 0 then call('SETRANGE', B .. 'states:' .. group, accepted * 2, table.concat(states)) end
add(key, 'accepted', n, 'waiting', waiting, 'non_ready', n - waiting)
add(B .. 'tenant:' .. tenant, 'unfinished', n)
if not held then activate(tenant, waiting) end
if request ~= '' then call('ZADD', seen, entry_ms or now, request) end
if mode ~= '' then call('HSET', key, 'submitted', 1) end
if mode == 'seal' or (total and accepted + n == total) then
  call('HSET', key, 'sealed', 1)
  attend(group)
end
if waiting > 0 and not held then wake('fetcher') end
return { 'OK', accepted, n }
