-- add_callbacks: adds callbacks to their queues. If a queue gets too long or too large, its oldest die.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  most   n      most callbacks of a queue
--   2  bytes  bytes  most bytes of their bodies
--   then for each callback:
--   +1  id      -   of the event
--   +2  queue   -   of the endpoint
--   +3  tenant  -   whose group it is
--   +4  group   -   the group
--   +5  type    -   of the event
--   +6  at      ms  when the group entered the status
--   +7  url     -   '' = that of the tenant's endpoint
--   +8  body    -   what is sent
-- Reply
--   {n, reply, …}  n have died. For each callback 'OK', or {'ERR', text}: a key of it has a wrong Redis
--                  type, and nothing was added
-- Twice: a callback that is pending or dead stays as it is; one that was delivered since is sent again. One of
-- another time is that of a deleted group with the same id: the new one takes its place.
-- Out of memory: goes through, because the events behind would wait otherwise.
-- Cost: 6 commands a callback, and some 10 for each that dies.
local most, bytes, replies, died = tonumber(ARGV[1]), tonumber(ARGV[2]), { 0 }, 0
allow_oom()
local now = now_ms()
local function known(id, queue)
  precheck_callbacks()
  precheck_queue(queue)
  local c = call('HMGET', callback(id), 'at', 'queue', 'size', 'attempt')
  if c[2] then precheck_queue(c[2]) end
  return c
end
local touched = {}
for i = 3, #ARGV, 8 do
  local id, queue, body = ARGV[i], ARGV[i + 1], ARGV[i + 7]
  local is = guarded(known, id, queue)
  replies[#replies + 1] = is[1] == 'ERR' and is or 'OK'
  if is[1] ~= 'ERR' and is[1] ~= ARGV[i + 5] then
    if is[2] then
      call('DEL', callback(id))
      call('ZREM', B .. 'callbacks:dead', id)
      dequeue_callback(id, is[2], is[3] or 0)
      touched[is[2]] = true
    end
    call('HSET', callback(id), 'queue', queue, 'tenant', ARGV[i + 2], 'group', ARGV[i + 3], 'type', ARGV[i + 4],
      'at', ARGV[i + 5], 'url', ARGV[i + 6], 'body', body, 'size', #body, 'state', 'pending', 'tries', 0,
      'attempt', is[4] and is[4] + 1 or 0, 'next', now)
    enqueue(id, queue, now, now)
    local held = call('HINCRBY', B .. 'callbacks:bytes', queue, #body)
    while call('ZCARD', B .. 'callbacks:age:' .. queue) > most or held > bytes do
      local first = call('ZRANGE', B .. 'callbacks:age:' .. queue, 0, 1)
      local oldest = first[first[1] == id and 2 or 1]
      if not oldest then break end
      local size = guarded(call, 'HGET', callback(oldest), 'size')
      if tonumber(size) then
        die(oldest, queue, size, 'the endpoint had too many pending callbacks', now)
      else -- its data is lost
        size = 0
        dequeue_callback(oldest, queue, size)
      end
      held, died = held - size, died + 1
    end
    touched[queue] = true
  end
end
for queue in pairs(touched) do refresh(queue, now) end
replies[1] = died
return replies
