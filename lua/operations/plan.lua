-- plan: stores what an operation does next, its page, and where it continues afterwards. Without a
-- page it only moves on.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  id        -    the operation's id
--   2  fence     n    fencing number of the partition's leader, who carries out operations
--   3  seq       n    how many pages and moves came before
--   4  cursor    -    where the operation continues
--   5  examined  n    how many groups or dead letters were compared with the filter
--   6  planned   n    how many of them match: those of the page
--   7  page      -    what to do with them, '' = none matches
--   8  last      0|1  1 = none is left behind the cursor
-- Reply
--   {'OK'}      the page is stored; without a page and behind the last one the operation is COMPLETED
--   {'FENCED'}  another process leads
--   {'STALE'}   the operation is not running, has a page, or has moved on
-- Twice: the second call is stale.
-- Out of memory: refused.
-- Cost: constant, and the bytes of the page.
local id, page, last = ARGV[1], ARGV[7], ARGV[8] == '1'
local key = operation(id)
if not leads(ARGV[2]) then return { 'FENCED' } end
local o = call('HMGET', key, 'state', 'page', 'seq', 'examined')
if o[1] ~= 'RUNNING' or o[2] or o[3] ~= ARGV[3] then return { 'STALE' } end
precheck_end_operation()
local examined = string.format('%.0f', tonumber(o[4] or 0) + ARGV[5])
call('HSET', key, 'cursor', ARGV[4], 'examined', examined, 'seq', tonumber(o[3]) + 1)
if page ~= '' then
  call('HSET', key, 'page', page, 'planned', ARGV[6], 'last', last and 1 or 0)
elseif last then
  end_operation(id, 'COMPLETED')
end
return { 'OK' }
