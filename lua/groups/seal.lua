-- seal: seals a group: it gets no more jobs. With a total that it has not reached, it is sealed as
-- soon as it has that many jobs. Its jobs run as before.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -  the group's id
--   2  total  n  how many jobs the group has in the end, '' = the jobs it has now
-- Reply
--   {'OK', status}              the group is sealed, by this or an earlier call
--   {'PENDING', accepted}       the group is sealed as soon as it has total jobs
--   {'NOGROUP'}                 there is no such group
--   {'CANCELLED'}               the group is cancelled
--   {'TOTAL', accepted, total}  total is not what was announced, or the group has more jobs, or it
--                               is sealed with another number; without total: it has fewer jobs
--                               than were announced. The reply's total is the announced one, or
--                               ARGV 2 if none was announced
-- Twice: the second call answers as the first.
-- Out of memory: refused.
-- Cost: constant.
local group, total = ARGV[1], tonumber(ARGV[2])
local key = B .. 'group:' .. group
local g = call('HMGET', key, 'status', 'sealed', 'accepted', 'total')
if not g[1] then return { 'NOGROUP' } end
if g[1] == 'CANCELLED' then return { 'CANCELLED' } end
local accepted, announced = tonumber(g[3] or 0), tonumber(g[4])
if total and (total < accepted or (announced and announced ~= total)) then
  return { 'TOTAL', accepted, announced or total }
end
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
