-- forget: dissolves the queue of an event that is closed or sold out, and deletes the event when
-- nobody is left in it and its retention is over.
-- State: W, A → nobody
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
-- Reply
--   {left, wait}
--        left  users with a record
--        wait  ms until there is more to do, -1 = never: the event is deleted or takes users
-- Users inside keep their slots. Of the queue, up to 200 users are removed in a call.
-- Twice: removes the next users.
-- Out of memory: goes through.
-- Cost: some µs a user.
local event = ARGV[1]
if not open_room(event) then
  allow_oom()
  call('ZREM', B .. 'rooms', event)
  return { 0, -1 }
end
if R.mode ~= 'closed' and R.mode ~= 'sold_out' then return { R.users, -1 } end
allow_oom()
if R.waiting + R.used + call('ZCARD', AWAY) == 0 and NOW >= R.closed + R.retention then
  call('ZREM', B .. 'rooms', event)
  call('UNLINK', ROOM, WAITING, AWAY, SLOTS, USERS)
  return { 0, -1 }
end
-- Users who poll are in both sets, waiting and away. So the set away is emptied only after the set
-- waiting.
local key, letter = WAITING, 'W'
if R.waiting == 0 then key, letter = AWAY, 'A' end
local list, n = call('ZRANGE', key, 0, 199, 'WITHSCORES'), 0
load_users(list, 1, 2)
for i = 1, #list, 2 do
  local user = list[i]
  local r = record_of(user) or lost(user, letter, letter == 'W' and list[i + 1] or 0)
  if r.letter == 'W' or r.letter == 'A' then
    put(user, nil)
    n = n + 1
  else
    drop(key, user)
  end
end
count('left', n)
local wait = close_room()
return { R.users, wait }
