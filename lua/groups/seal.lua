-- seal: no more jobs come to a group; its jobs go on as they were.
-- KEYS  base
-- ARGV  group, total ('' = as many as there are now)
-- Reply {'OK', status} sealed, now or before | {'PENDING', accepted} total is noted and takes effect when it is reached |
--       {'NOGROUP'} | {'CANCELLED'} | {'TOTAL', accepted, total} total is below what was accepted, or another one was announced
-- Twice: the second call answers as the first. Refused when memory is full.
local group, total = ARGV[1], tonumber(ARGV[2])
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'sealed', 'accepted', 'total')
if not g[1] then return { 'NOGROUP' } end
if g[1] == 'CANCELLED' then return { 'CANCELLED' } end
local accepted, announced = tonumber(g[3] or 0), tonumber(g[4])
if total and (total < accepted or (announced and announced ~= total)) then return { 'TOTAL', accepted, announced or total } end
if g[2] then
  if total and total ~= accepted then return { 'TOTAL', accepted, total } end
  return { 'OK', g[1] }
end
if not total and announced and accepted < announced then return { 'TOTAL', accepted, announced } end
precheck_mark_dirty()
if total and not announced then call('HSET', key, 'total', total) end
if total and total > accepted then return { 'PENDING', accepted } end
call('HSET', key, 'sealed', 1)
mark_dirty(group)
return { 'OK', g[1] }
