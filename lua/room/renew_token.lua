-- renew_token: extends the life of a token.
-- State: P
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
--   2  user   -  the user's id
--   3  fence  -  of the token
-- Reply
--   {'RENEWED', expires}  the token expires then (ms): after the event's token_ttl, or at the end
--                         of max_session if that is earlier, but never earlier than before
--   {'OVER', 0}           max_session has passed since the user's first token
--   {'NONE', 0}           the token is not valid any more
-- Twice: the same expiry or a later one.
-- Out of memory: goes through.
-- Cost: constant.
local event, user, fence = ARGV[1], ARGV[2], ARGV[3]
if not open_room(event) then return { 'NONE', 0 } end
load_users({ user }, 1, 1)
local r = record_of(user)
if not r or r.letter ~= 'P' or r.fence ~= fence or r.expires <= NOW then return { 'NONE', 0 } end
local expires = NOW + R.token_ttl
if R.max_session > 0 then
  local last = r.first + R.max_session
  if last <= NOW then return { 'OVER', 0 } end
  expires = math.min(expires, last)
end
expires = math.max(expires, r.expires)
allow_oom()
put(user, {
  letter = 'P', number = r.number, conn = r.conn, since = r.since, fence = fence, expires = expires,
  first = r.first,
})
close_room()
return { 'RENEWED', string.format('%.0f', expires) }
