-- append: jobs enter a group.  (nothing) → waiting, or non-ready until their run_at
-- KEYS  base
-- ARGV  group, request id ('' = none; @ENTRY… = an entry of the ingest stream; =N = piece N of the submission), limit of jobs a group,
--       mode ('' | 'last' of a submission | 'seal' last, and no more jobs come),
--       'plain', then for each job: payload; or '', then for each job: type ('' = the group's), run_at ms (0 = at once), trace, payload
-- Reply {'OK', first ordinal, n} | {'DUP'} this request was applied before | {'GAP', pieces} only these are there, and more go before this one |
--       {'NOGROUP'} | {'SEALED', status} |
--       {'TOTAL', total, accepted} more jobs than announced | {'LIMIT', accepted}
-- Twice, with a request id: the second call answers DUP. Refused when memory is full (the first write is RPUSH, HSET or ZADD). Cost: a few µs a job.
local LARGE = 4096
local group, request, limit, mode, plain = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5] == 'plain'
local key, arg = B .. 'group:' .. group, 6
-- Entries of the ingest stream come again only while they are pending there, so they are remembered apart and for less long.
local entry_ms = string.match(request, '^@(%d+)%-')
-- Pieces of the submission come in order and are counted in the group itself, for as long as it lives. A failover may have lost the one in front.
local piece = tonumber((string.match(request, '^=(%d+)$')))
local applied = entry_ms and B .. 'entries' or B .. 'messages'
local g = call('HMGET', key, 'tenant', 'type', 'lane', 'status', 'accepted', 'sealed', 'total', 'run_at', 'types', 'submitted', 'pieces', 'paused')
if not g[1] then return { 'NOGROUP' } end
if piece and piece > tonumber(g[11] or 0) then return { 'GAP', g[11] or 0 } end
if mode ~= '' and g[10] then return { 'DUP' } end
if piece and piece < tonumber(g[11] or 0) then return { 'DUP' } end
if request ~= '' and not piece and call('ZSCORE', applied, request) then return { 'DUP' } end
local tenant, group_type, lane, status, accepted, total = g[1], g[2], g[3], g[4], tonumber(g[5] or 0), tonumber(g[7])
if g[6] or status == 'CANCELLED' then return { 'SEALED', status } end
local n = (#ARGV - arg + 1) / (plain and 1 or 4)
if total and accepted + n > total then return { 'TOTAL', total, accepted } end
if accepted + n > limit then return { 'LIMIT', accepted } end

local now = now_ms()
local group_run_at = tonumber(g[8] or 0)
-- A group stays held until schedule releases it, so that its jobs are counted as active once.
local scheduled = group_run_at > 0 and (group_run_at > now or call('ZSCORE', B .. 'scheduled', group) ~= false)
local held = scheduled or g[12] -- a paused one until it is resumed
local factor = alpha()
-- queues holds a list of blobs by type, later a list of due times and blobs.
local queues, later, order, states, large, waiting = {}, {}, {}, {}, {}, 0
local at_ms = string.format('|%.0f|', now)
local function payload_of(i, payload)
  if #payload <= LARGE then return payload end
  large[#large + 1] = accepted + i
  large[#large + 1] = payload
  return ''
end
if plain then
  local q, tail = {}, at_ms .. '|'
  for i = 0, n - 1 do q[i + 1] = string.format('%d', accepted + i) .. tail .. payload_of(i, ARGV[arg + i]) end
  if n > 0 then queues[group_type], later[group_type], order[1] = q, {}, group_type end
  states[1], waiting = string.rep('W!', n), n
else
  for i = 0, n - 1 do
    local at = arg + i * 4
    local typ, run_at, trace = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
    if typ == '' then typ = group_type end
    if not queues[typ] then queues[typ], later[typ], order[#order + 1] = {}, {}, typ end
    local queued = string.format('%d', accepted + i) .. at_ms .. trace .. '|' .. payload_of(i, ARGV[at + 3])
    if run_at > now and run_at > group_run_at then
      states[i + 1] = 'N!'
      local l = later[typ]
      l[#l + 1] = run_at
      l[#l + 1] = group .. '|' .. typ .. '|0|0|0|0|0|0|0' .. at_ms .. 'S|' .. queued
    else
      states[i + 1] = 'W!'
      waiting = waiting + 1
      local q = queues[typ]
      q[#q + 1] = queued
    end
  end
end
local sealing = mode == 'seal' or (total and accepted + n == total)

see('STRLEN', B .. 'states:' .. group)
see_rerank(g[9], factor)
see('ZCARD', applied, B .. 'types')
see_activate(tenant)
for _, typ in ipairs(order) do
  see('LLEN', B .. 'queue:' .. group .. ':' .. typ)
  see('HLEN', B .. 'load:' .. typ)
  if not held then see_enqueue(typ, lane, tenant) end
  if #later[typ] > 0 then see_park(tenant, typ) end
end
if #large > 0 then see('HLEN', B .. 'payloads:' .. group) end
if scheduled then
  see('ZCARD', B .. 'scheduled')
  see('LLEN', B .. 'wake:dispatcher')
elseif waiting > 0 then
  see('LLEN', B .. 'wake:fetcher')
end
if sealing then see_attend() end

if #large > 0 then call('HSET', B .. 'payloads:' .. group, unpack(large)) end
local types = g[9] or ''
for _, typ in ipairs(order) do
  local q = queues[typ]
  if #q > 0 then
    call('RPUSH', B .. 'queue:' .. group .. ':' .. typ, unpack(q))
    call('HINCRBY', B .. 'load:' .. typ, 'waiting', #q)
    if not held then enqueue(typ, lane, tenant, group, #q, now, factor) end
  end
  if #later[typ] > 0 then park(tenant, typ, later[typ]) end
  if not string.find('|' .. types .. '|', '|' .. typ .. '|', 1, true) then
    types = types == '' and typ or types .. '|' .. typ
    call('HSET', key, 'types', types)
  end
  if not call('ZSCORE', B .. 'types', typ) then call('ZADD', B .. 'types', now, typ) end
end
if scheduled then
  call('ZADD', B .. 'scheduled', group_run_at, group)
  wake('dispatcher')
end
if n > 0 then call('SETRANGE', B .. 'states:' .. group, accepted * 2, table.concat(states)) end
add(key, 'accepted', n, 'waiting', waiting, 'non_ready', n - waiting)
rerank(group, types, factor)
add(B .. 'tenant:' .. tenant, 'unfinished', n)
if not held then activate(tenant, waiting) end
if piece then
  call('HSET', key, 'pieces', piece + 1)
elseif request ~= '' then
  call('ZADD', applied, entry_ms or now, request)
end
if mode ~= '' then call('HSET', key, 'submitted', 1) end
if sealing then
  call('HSET', key, 'sealed', 1)
  attend(group)
end
if waiting > 0 and not held then wake('fetcher') end
return { 'OK', accepted, n }
