-- redeliver: makes dead callbacks pending again, and lets pending ones be tried at once. Each gets all
-- its tries again.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  most  n  most callbacks of a queue
--   then:
--   +1  id  -  of a callback
-- Reply
--   one for each callback: 'OK'; 'FULL': its queue has as many as it may have; 'NONE': there is no such
--   callback
-- Twice: the second call lets it be tried at once again.
-- Out of memory: goes through.
-- Cost: some 10 commands a callback.
local most, replies, now = tonumber(ARGV[1]), {}, now_ms()
precheck_callbacks()
local function read(id)
  local c = call('HMGET', callback(id), 'state', 'queue')
  if c[2] then precheck_queue(c[2]) end
  return c
end
allow_oom()
for i = 2, #ARGV do
  local id = ARGV[i]
  local c = guarded(read, id)
  local state, queue, reply = c[1], c[2], 'OK'
  if not queue or state == 'ERR' then
    reply = 'NONE'
  elseif state == 'dead' and call('ZCARD', B .. 'callbacks:due:' .. queue) >= most then
    reply = 'FULL'
  else
    if state == 'dead' then
      call('HDEL', callback(id), 'died')
      call('HSET', callback(id), 'state', 'pending')
      call('HINCRBY', callback(id), 'attempt', 1) -- an attempt that was late to settle is stale
    end
    call('HSET', callback(id), 'next', now, 'tries', 0)
    enqueue(id, queue, now, now)
    call('ZREM', B .. 'callbacks:dead', id)
    refresh(queue, now)
  end
  replies[#replies + 1] = reply
end
return replies
