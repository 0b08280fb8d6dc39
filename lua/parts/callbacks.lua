-- callbacks: what is sent to tenants when their groups enter a status. The callbacks of one endpoint
-- are a queue; one is pending in its queue, or dead.
-- NEEDS  base, signals
-- OFFERS
--   callback(id)                 the key of its hash
--   precheck_callbacks()         reads the keys that belong to no queue
--   precheck_queue(queue)        reads the keys of a queue
--   enqueue(id, queue, due, now) adds a callback to its queue, or sets when it is due there
--   dequeue_callback(id, queue, size)
--                                removes it; size is the bytes of its body
--   note_due(queue, now, given)  notes when the queue is due next, and returns it; nil if it is empty. A
--                                queue of which some were given now is behind the others that are due
--   refresh(queue, now)          does the same, and wakes a watcher if that is now
--   die(id, queue, size, reason, now)
--                                makes a pending callback a dead one

local function callback(id) return B .. 'callback:' .. id end

local function precheck_callbacks()
  precheck('ZCARD', B .. 'callbacks', B .. 'callbacks:dead')
  precheck('HLEN', B .. 'callbacks:bytes')
  precheck('LLEN', B .. 'wake:callbacks')
end
local function precheck_queue(queue)
  precheck('ZCARD', B .. 'callbacks:due:' .. queue, B .. 'callbacks:age:' .. queue)
end

local function enqueue(id, queue, due, now)
  call('ZADD', B .. 'callbacks:due:' .. queue, due, id)
  call('ZADD', B .. 'callbacks:age:' .. queue, 'NX', now, id)
end

local function dequeue_callback(id, queue, size)
  call('ZREM', B .. 'callbacks:due:' .. queue, id)
  call('ZREM', B .. 'callbacks:age:' .. queue, id)
  if tonumber(size) > 0 then call('HINCRBY', B .. 'callbacks:bytes', queue, -size) end
end

local function note_due(queue, now, given)
  local first = call('ZRANGE', B .. 'callbacks:due:' .. queue, 0, 0, 'WITHSCORES')
  if first[1] then
    local due = tonumber(first[2])
    if due < now then -- it keeps its turn, however long its own callbacks have waited
      local turn = given and now or tonumber(call('ZSCORE', B .. 'callbacks', queue) or due)
      if turn <= now then due = math.max(due, turn) end
    end
    call('ZADD', B .. 'callbacks', due, queue)
    return due
  end
  call('ZREM', B .. 'callbacks', queue)
  call('HDEL', B .. 'callbacks:bytes', queue)
  return nil
end
local function refresh(queue, now)
  local due = note_due(queue, now)
  if due and due <= now then wake('callbacks') end
end

local function die(id, queue, size, reason, now)
  call('HDEL', callback(id), 'body', 'next')
  call('HSET', callback(id), 'state', 'dead', 'size', 0, 'error', reason, 'died', now)
  call('ZADD', B .. 'callbacks:dead', now, id)
  dequeue_callback(id, queue, size)
end
