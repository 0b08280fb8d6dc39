-- delete_callbacks: deletes callbacks, pending and dead ones.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1…  ids  -  of events
-- Reply
--   n  how many there were
-- Twice: the second call finds none.
-- Out of memory: goes through.
-- Cost: 6 commands for each that exists.
local n = 0
precheck_callbacks()
for _, id in ipairs(ARGV) do
  local c = call('HMGET', callback(id), 'queue', 'size')
  if c[1] then
    precheck_queue(c[1])
    allow_oom()
    call('DEL', callback(id))
    call('ZREM', B .. 'callbacks:dead', id)
    dequeue_callback(id, c[1], c[2] or 0)
    refresh(c[1], now_ms())
    n = n + 1
  end
end
return n
