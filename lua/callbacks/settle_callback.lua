-- settle_callback: stores how an attempt to send a callback has ended.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  id       -   of the callback
--   2  attempt  n   its number, from claim_callbacks
--   3  how      -   ok, retry, dead, defer: as retry, but the try is not counted, or release: it was
--                    not tried
--   4  delay    ms  until the next try
--   5  error    -   why it has failed
--   6  answer   -   the beginning of the answer
-- Reply
--   {'OK'}     stored
--   {'STALE'}  the callback is gone, dead, or another attempt has begun: nothing was stored
-- Twice: the second call is stale.
-- Out of memory: goes through.
-- Cost: constant.
local id, how = ARGV[1], ARGV[3]
local key = callback(id)
local c = call('HMGET', key, 'attempt', 'state', 'queue', 'size', 'tries')
if c[1] ~= ARGV[2] or c[2] ~= 'pending' then return { 'STALE' } end
local queue = c[3]
precheck_callbacks()
precheck_queue(queue)
allow_oom()
local now = now_ms()
if how == 'ok' then
  dequeue_callback(id, queue, c[4])
  call('DEL', key)
elseif how == 'dead' then
  die(id, queue, c[4], ARGV[5], now)
  call('HSET', key, 'answer', ARGV[6], 'tries', tonumber(c[5]) + 1)
else
  local due = string.format('%.0f', now + ARGV[4])
  if how ~= 'release' then call('HSET', key, 'error', ARGV[5], 'answer', ARGV[6]) end
  if how == 'retry' then call('HINCRBY', key, 'tries', 1) end
  call('HINCRBY', key, 'attempt', 1) -- it has ended
  call('HSET', key, 'next', due)
  enqueue(id, queue, due, now)
end
refresh(queue, now)
return { 'OK' }
