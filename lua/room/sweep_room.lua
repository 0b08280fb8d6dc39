-- sweep_room: moves the waiting users of dead brokers to away.
-- State: W → A
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
--   2  from   n  the number to begin behind, 0 at first
--   then for each live broker:
--   +1  instance  -  its instance
-- Reply
--   {next, n, hold}
--        next  the number to continue with, 0: the end
--        n     users whom this call has moved
--        hold  ms for which nothing is swept: Redis or all brokers stood still, and users may still
--              return
-- A user who was moved keeps the place for the event's grace, at least 10 s. Streams younger than
-- 10 s are left out: a broker that has just started is not yet in the caller's list.
-- Twice: moves only users whom the first call has left.
-- Out of memory: goes through.
-- Cost: about 1 µs a user; reads 1,000 users a call, and moves at most 200.
local event, from = ARGV[1], ARGV[2]
local YOUNG, PAGE, MOST = 10000, 1000, 200
if not open_room(event) then return { 0, 0, 0 } end
local hold = tonumber(call('HGET', B .. 'cleanup', 'hold_until') or 0) - NOW
if hold > 0 then return { 0, 0, hold } end
local alive = {}
for i = 3, #ARGV do alive[ARGV[i]] = true end
local page = call('ZRANGEBYSCORE', WAITING, '(' .. from, '+inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
if #page == 0 then return { 0, 0, 0 } end
load_users(page, 1, 2)
local n, read = 0, 0 -- users who are away now, and who were looked at
for i = 1, #page, 2 do
  if n == MOST then break end
  read = read + 1
  local user = page[i]
  local r = record_of(user)
  local instance = r and r.letter == 'W' and instance_of(r.conn)
  if instance and not alive[instance] and math.abs(NOW - r.since) >= YOUNG then
    put(user, {
      letter = 'A', number = r.number, conn = r.conn, since = r.since, fence = '', expires = 0, first = 0,
      kept = NOW + math.max(R.grace, YOUNG),
    })
    n = n + 1
  end
end
if n > 0 then
  allow_oom()
  close_room()
end
local next_number = read < PAGE and 2 * read == #page and 0 or page[2 * read]
return { next_number, n, 0 }
