-- snapshot: reads the state of events at one instant.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   then for each event:
--   +1  event  -  its id
-- Reply
--   {at, last, room, waiting, used, users, …}
--        at       Redis time, ms
--        last     id of the newest entry of the stream moves, 0-0: none
--        room     the event's hash, as HGETALL returns it; empty: there is no such event
--        waiting  users who wait
--        used     users who hold a slot
--        users    users with a record
-- Twice: reads again.
-- Out of memory: goes through.
-- Cost: some µs an event; at most 200 events.
local newest = call('XREVRANGE', B .. 'moves', '+', '-', 'COUNT', 1)
local reply = { now_ms(), newest[1] and newest[1][1] or '0-0' }
for i = 1, #ARGV do
  local room, n = B .. 'room:' .. ARGV[i], #reply
  reply[n + 1], reply[n + 2] = call('HGETALL', room), call('ZCARD', room .. ':waiting')
  reply[n + 3], reply[n + 4] = call('ZCARD', room .. ':slots'), call('HLEN', room .. ':users')
end
return reply
