-- forget_callbacks: deletes dead callbacks whose retention is over.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  before  ms  those that died before
--   2  most    n   most callbacks of the call
-- Reply
--   n  how many were deleted
-- Twice: the second call deletes further ones.
-- Out of memory: goes through.
-- Cost: two commands a callback.
local ids = call('ZRANGEBYSCORE', B .. 'callbacks:dead', '-inf', '(' .. ARGV[1], 'LIMIT', 0, ARGV[2])
if #ids == 0 then return 0 end
allow_oom()
for _, id in ipairs(ids) do
  call('DEL', callback(id))
  call('ZREM', B .. 'callbacks:dead', id)
end
return #ids
