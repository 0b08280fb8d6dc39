-- count: counts what was done with the page of an operation, and removes the page.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  id       -  the operation's id
--   2  fence    n  fencing number of the partition's leader
--   3  seq      n  the number of the page
--   4  changed  n  how many were changed
--   then for each reason why some were skipped:
--   +1  reason    -  the reason
--   +2  skipped   n  how many
--   +3  examples  -  some ids, divided by spaces, kept if there are none of this reason yet
-- Reply
--   {'OK'}      they are counted. Behind the last page the operation is COMPLETED; one that was being
--               cancelled is CANCELLED
--   {'FENCED'}  another process leads
--   {'STALE'}   the page is not there: it was counted
-- Twice: the second call is stale.
-- Out of memory: goes through.
-- Cost: constant.
local id = ARGV[1]
local key = operation(id)
if not leads(ARGV[2]) then return { 'FENCED' } end
local o = call('HMGET', key, 'page', 'seq', 'state', 'last', 'matched', 'changed', 'skipped')
if not o[1] or o[2] ~= ARGV[3] then return { 'STALE' } end
precheck_end_operation()
-- plus returns the text of a number that is larger by n: one that can't be read counts as 0.
local function plus(value, n) return string.format('%.0f', (tonumber(value or 0) or 0) + n) end
local set, skipped = {}, 0
for i = 5, #ARGV, 3 do
  local reason = ARGV[i]
  skipped = skipped + ARGV[i + 1]
  set[#set + 1], set[#set + 2] = 'skipped:' .. reason, plus(call('HGET', key, 'skipped:' .. reason), ARGV[i + 1])
  set[#set + 1], set[#set + 2] = 'examples:' .. reason, call('HGET', key, 'examples:' .. reason) or ARGV[i + 2]
end
allow_oom()
call('HSET', key, 'matched', plus(o[5], ARGV[4] + skipped), 'changed', plus(o[6], ARGV[4]),
  'skipped', plus(o[7], skipped), 'planned', 0, unpack(set))
call('HDEL', key, 'page')
if o[3] == 'CANCELLING' then
  end_operation(id, 'CANCELLED')
elseif o[4] == '1' then
  end_operation(id, 'COMPLETED')
end
return { 'OK' }
