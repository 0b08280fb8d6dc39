-- complete: ends the entry of a user with a token, and gives the slot back: the protected service
-- is done with the user.
-- State: P → nobody
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -    the event's id
--   2  user   -    the user's id
--   3  fence  -    of the token
--   4  sold   0|1  1: a seat is sold. It is counted even if the event has no stock
-- Reply
--   {'DONE'}  the user has no record any more
--   {'NONE'}  the token is unknown, or its slot has ended
-- It also works shortly after the token has expired, while the user still has the slot, because
-- verifiers allow some leeway. When the last seat is sold, the event is sold out, unless it is
-- closed.
-- Twice: NONE, and no second seat is sold.
-- Out of memory: goes through.
-- Cost: constant.
local event, user, fence, sold = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not open_room(event) then return { 'NONE' } end
load_users({ user }, 1, 1)
local r = record_of(user)
if not r or r.letter ~= 'P' or r.fence ~= fence then return { 'NONE' } end
allow_oom()
put(user, nil)
count('completed', 1)
if sold == '1' then count('sold', 1) end
if sold == '1' and R.stock then
  R.stock = math.max(0, R.stock - 1)
  call('HSET', ROOM, 'stock', string.format('%.0f', R.stock))
  if R.stock == 0 and R.mode ~= 'closed' then
    R.mode, R.closed = 'sold_out', NOW
    call('HSET', ROOM, 'mode', 'sold_out', 'closed', string.format('%.0f', NOW))
  end
end
close_room()
return { 'DONE' }
