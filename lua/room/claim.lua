-- claim: begins the entry tokens of promoted users: they are IN_PROGRESS from now on.
-- State: R → P
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
--   then for each user:
--   +1  user  -  the user's id
--   +2  conn  -  the stream of the user, empty: any
-- Reply
--   {code, fence, expires, …}
--        'CLAIMED'  the user has a token, from this or an earlier call, which expires then (ms)
--        'NONE'     the user holds no slot, or the token is not valid any more
--        'STALE'    the user has another conn
--        fence, expires
--                   of CLAIMED; otherwise empty and 0
-- Twice: the same fence and expiry.
-- Out of memory: goes through.
-- Cost: some µs a user; at most 200 users.
local event = ARGV[1]
local reply = {}
local known = open_room(event)
if known then
  load_users(ARGV, 2, 2)
  allow_oom()
end
for i = 2, #ARGV, 2 do
  local user, conn = ARGV[i], ARGV[i + 1]
  local r = known and record_of(user)
  local result = 'NONE'
  if r and conn ~= '' and r.conn ~= conn then
    result = 'STALE'
  elseif r and r.letter == 'R' then
    result = 'CLAIMED'
    r = {
      letter = 'P', number = r.number, conn = r.conn, since = r.since, fence = r.fence,
      expires = NOW + R.token_ttl, first = NOW,
    }
    put(user, r)
    count('admitted', 1)
  elseif r and r.letter == 'P' and r.expires > NOW then
    result = 'CLAIMED'
  end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = result, '', '0'
  if result == 'CLAIMED' then
    reply[n + 2], reply[n + 3] = r.fence, string.format('%.0f', r.expires)
  end
end
if known then close_room() end
return reply
