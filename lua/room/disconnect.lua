-- disconnect: records that the streams of users have ended.
-- State: W → A, or nobody without grace; R, P → nobody if the event says so
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
--   then for each user:
--   +1  user  -  the user's id
--   +2  conn  -  the stream that has ended
-- Reply
--   {code, …}
--        'AWAY'   the user keeps the place for the event's grace
--        'NOTED'  nothing changes: the user is away already, or the slot runs to its end
--        'GONE'   the user has no record any more
--        'NO_SHOW'
--                 the same for a READY user
--        'STALE'  event or user is unknown, or the user has another conn or polls: nothing changes
-- A READY user is gone if no_show is release, a user with a token if on_close is release.
-- Twice: NOTED or STALE.
-- Out of memory: goes through.
-- Cost: some µs a user; at most 200 users.
local event = ARGV[1]
local reply = {}
if not open_room(event) then
  for i = 2, #ARGV, 2 do reply[i / 2] = 'STALE' end
  return reply
end
load_users(ARGV, 2, 2)
allow_oom()
for i = 2, #ARGV, 2 do
  local user, conn = ARGV[i], ARGV[i + 1]
  local r = record_of(user)
  local result = 'NOTED'
  if not r or conn == '' or r.conn ~= conn then
    result = 'STALE'
  elseif r.letter == 'W' and R.grace > 0 then
    result = 'AWAY'
    put(user, {
      letter = 'A', number = r.number, conn = conn, since = r.since, fence = '', expires = 0, first = 0,
      kept = NOW + R.grace,
    })
  elseif r.letter == 'W' or r.letter == 'P' and R.on_close == 'release' then
    result = 'GONE'
    count('left', 1)
    put(user, nil)
  elseif r.letter == 'R' and R.no_show == 'release' then
    result = 'NO_SHOW'
    count('no_shows', 1)
    put(user, nil)
  end
  reply[i / 2] = result
end
close_room()
return reply
