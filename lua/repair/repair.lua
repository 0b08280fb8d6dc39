-- repair: a group's ledger counts again what its states say, and it is on the lists where it belongs.
-- KEYS  base
-- ARGV  group, its tenant, version of the repair that was seen (its field repaired, 0 = none), then pairs of field (code:X = one of the error codes) and what is to be added to it
-- Reply {'OK'} | {'VERSION'} somebody has repaired it meanwhile | {'GONE'} there is no such group: it is taken off the lists
-- Every transition moves ledger and states alike, so what they differ by stays until it is repaired, however much the group moves.
-- Twice: the version has gone on. Goes through when memory is full. Cost: constant.
local group, tenant, version, now = ARGV[1], ARGV[2], ARGV[3], now_ms()
local key, codes = B .. 'group:' .. group, B .. 'codes:' .. group
local g = call('HMGET', key, 'status', 'repaired', 'at:created')
precheck('ZCARD', B .. 'groups', B .. 'groups:' .. tenant, B .. 'open', B .. 'ended', B .. 'tenants')
precheck_mark_dirty()
if not g[1] then
  for _, list in ipairs({ B .. 'groups', B .. 'groups:' .. tenant, B .. 'open', B .. 'ended' }) do call('ZREM', list, group) end
  call('SREM', B .. 'dirty', group)
  return { 'GONE' }
end
if (g[2] or '0') ~= version then return { 'VERSION' } end
precheck('HLEN', codes)
allow_oom()
for i = 4, #ARGV, 2 do
  local code = string.match(ARGV[i], '^code:(.+)$')
  if not code then
    call('HINCRBY', key, ARGV[i], ARGV[i + 1])
  elseif call('HINCRBY', codes, code, ARGV[i + 1]) == 0 then
    call('HDEL', codes, code)
  end
end
call('HINCRBY', key, 'repaired', 1)

local status, created = g[1], tonumber(g[3] or now)
local ended = status == 'COMPLETED' or status == 'FAILED' or status == 'CANCELLED'
local left = call('HMGET', key, 'sweep', 'at:' .. string.lower(status), 'waiting', 'non_ready', 'ready', 'in_flight')
if status == 'CANCELLED' and not left[1] then -- it was settled, but not all of it
  for i = 3, 6 do
    if tonumber(left[i] or 0) > 0 then left[1] = 0 end
  end
  if left[1] then call('HSET', key, 'sweep', 0) end
end
call('ZADD', B .. 'groups', 'NX', created, group)
call('ZADD', B .. 'groups:' .. tenant, 'NX', created, group)
call('ZADD', B .. 'tenants', 0, tenant)
if ended and not left[1] then
  call('ZREM', B .. 'open', group)
  call('ZADD', B .. 'ended', 'NX', tonumber(left[2] or now), group)
else
  call('ZREM', B .. 'ended', group)
  call('ZADD', B .. 'open', 'NX', created, group)
end
mark_dirty(group)
return { 'OK' }
