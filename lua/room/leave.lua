-- leave: removes a user from an event, in any state.
-- State: W, A, R, P → nobody
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
--   2  user   -  the user's id
-- Reply
--   {'LEFT', conn}  the user has no record any more; conn is the user's last stream, empty: none
--   {'NONE', ''}    the user is unknown
-- Twice: NONE.
-- Out of memory: goes through.
-- Cost: constant.
local event, user = ARGV[1], ARGV[2]
if not open_room(event) then return { 'NONE', '' } end
load_users({ user }, 1, 1)
local r = record_of(user)
if not r then return { 'NONE', '' } end
allow_oom()
put(user, nil)
count('left', 1)
close_room()
return { 'LEFT', r.conn }
