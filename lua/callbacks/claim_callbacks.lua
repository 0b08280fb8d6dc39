-- claim_callbacks: gives callbacks that are due to a watcher, which sends them. Each is due again when its lease
-- has ended.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  most   n   most callbacks of the call
--   2  each   n   most callbacks of a queue that the watcher sends at once
--   3  lease  ms  how long they are the watcher's
--   then for each queue of which the watcher sends some now:
--   +1  queue  -  its name
--   +2  n      n  how many
-- Reply
--   {now, wait, {id, attempt, queue, tenant, group, type, at, url, tries, body, endpoint}, …}
--         now: ms; wait: ms until the next queue is due that may be given, -1 = there is none;
--         endpoint: the tenant's endpoint as JSON, '' = none
-- Twice: the second call gives others.
-- Out of memory: goes through.
-- Cost: some 10 commands a callback.
local most, each, lease, busy, given = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), {}, {}
precheck_callbacks()
precheck('HLEN', B .. 'endpoints')
local now = now_ms()
for i = 4, #ARGV, 2 do busy[ARGV[i]] = tonumber(ARGV[i + 1]) end
local queues = call('ZRANGE', B .. 'callbacks', 0, most + floor((#ARGV - 3) / 2), 'WITHSCORES')
if #queues == 0 then return { now, -1 } end
local wait, begun = -1, false
local function read(queue, n)
  precheck_queue(queue)
  return call('ZRANGEBYSCORE', B .. 'callbacks:due:' .. queue, '-inf', now, 'LIMIT', 0, n)
end
for i = 1, #queues, 2 do
  local queue, due = queues[i], tonumber(queues[i + 1])
  local free = math.min(each - (busy[queue] or 0), most - #given)
  if due > now then
    if free > 0 and wait < 0 then wait = due - now end
  elseif free > 0 then
    local ids = guarded(read, queue, free)
    if not begun then allow_oom() end
    begun = true
    if ids[1] == 'ERR' then
      call('ZADD', B .. 'callbacks', now + lease, queue) -- until its keys are mended
    else
      for _, id in ipairs(ids) do
        local c = guarded(call, 'HMGET', callback(id), 'tenant', 'group', 'type', 'at', 'url', 'tries', 'body')
        if not c[1] or #c == 2 then
          dequeue_callback(id, queue, 0) -- its data is lost
        else
          local attempt = call('HINCRBY', callback(id), 'attempt', 1)
          call('ZADD', B .. 'callbacks:due:' .. queue, now + lease, id)
          given[#given + 1] = { id, attempt, queue, c[1], c[2] or '', c[3] or '', tonumber(c[4] or 0), c[5] or '',
            tonumber(c[6] or 0), c[7] or '', call('HGET', B .. 'endpoints', c[1]) or '' }
        end
      end
      note_due(queue, now, true)
    end
  end
end
return { now, wait, unpack(given) }
