-- enter: gives users a number, or finds the place that they have.
-- State: nobody → W or R; A → W
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -   the event's id
--   2  mode   -   new:   an unknown user gets a number
--                 known: an unknown user gets NONE
--                 again: as known, and only a record with this conn counts
--   3  poll   ms  longest time until a user without a conn calls again
--   then for each user:
--   +1  user  -  the user's id
--   +2  conn  -  the stream by which the user is connected, empty: the user polls
-- Reply
--   {'UNKNOWN'}      there is no such event
--   {'OK', change, code, number, fence, expires, replaced, new, …}
--        change    change number of the event after the call
--        code      'ENTERED'      a new number; the user waits
--                  'BACK'         the user has a number and waits
--                  'READY'        the user holds a slot, until expires (ms)
--                  'IN_PROGRESS'  the user has a token, which expires then
--                  'NONE'         the user is unknown
--                  'STALE'        mode again: the record has another conn
--                  'FULL'         as many users are waiting or away as max_waiting allows
--                  'CLOSED', 'SOLD_OUT'
--                                 the event takes nobody
--        number    the user's number; 0 without a record, and with NONE and STALE
--        fence     of READY and IN_PROGRESS, otherwise empty
--        replaced  the conn that this call's conn has replaced, empty: none
--        new       1: this call has given the number
-- A user who polls keeps the place for three times poll, at least for the event's grace. A user who
-- polls (a call without a conn) never replaces an open stream. If the event is open, nobody waits,
-- a slot is free and the rate allows it, a new user is READY at once: the number leaves the queue,
-- and the caller calls claim. A user whose token has expired counts as unknown. Mode new then gives
-- the slot back before it gives a number.
-- Twice: the same answer, with BACK instead of ENTERED, new 0 and replaced empty.
-- Out of memory: refused.
-- Cost: some µs a user; at most 200 users.
local event, mode, poll = ARGV[1], ARGV[2], tonumber(ARGV[3])
if not open_room(event) then return { 'UNKNOWN' } end
load_users(ARGV, 4, 2)
local kept = NOW + math.max(R.grace, 3 * poll)

-- newcomer gives an unknown user a number, and returns the code of the reply. If the event is open,
-- nobody is waiting, a slot is free and the rate allows it, the user also gets the slot at once. It
-- refuses users of a closed, sold-out or full event.
local function newcomer(user, conn)
  local result
  if R.mode == 'closed' then
    result = 'CLOSED'
  elseif R.mode == 'sold_out' then
    result = 'SOLD_OUT'
  elseif R.mode == 'open' and R.waiting == 0 and free_slots() > 0 and permits() > 0 then
    result = 'READY'
  elseif R.users - R.used >= R.max_waiting then
    result = 'FULL'
  else
    result = 'ENTERED'
  end
  if result ~= 'READY' and result ~= 'ENTERED' then
    count('refused', 1)
    return result
  end
  R.tail = R.tail + 1
  local r = {
    letter = 'W', number = R.tail, conn = conn, since = NOW, fence = '', expires = 0, first = 0, kept = kept,
  }
  if result == 'READY' then
    spend_permits(1)
    r.letter, r.fence, r.expires = 'R', next_fence(), NOW + R.ready
    left_queue(R.tail)
    count('promoted', 1)
  end
  count('entered', 1)
  put(user, r)
  return result
end

-- known returns the code of the reply for a user with a record, and the conn that the caller's conn
-- replaces. It stores that conn, prolongs the place of a user who polls, and makes an away user
-- waiting again. If the event is closed or sold out, it changes nothing for users of the queue.
local function known(user, r, conn)
  local replaced = ''
  local waits = r.letter == 'W' or r.letter == 'A'
  if waits and (R.mode == 'closed' or R.mode == 'sold_out') then
    return R.mode == 'closed' and 'CLOSED' or 'SOLD_OUT', replaced
  end
  local polls = conn == '' and (r.letter == 'A' or r.letter == 'W' and r.conn == '')
  -- In the mode again the field since is renewed: a sweep with a list of live brokers that does not
  -- contain this broker yet may still run, and spares recent streams.
  if conn ~= '' and r.conn ~= conn or r.letter == 'A' or polls or mode == 'again' and r.letter == 'W' then
    if conn ~= '' and r.conn ~= conn then replaced = r.conn end
    local is = {
      letter = r.letter == 'A' and 'W' or r.letter, number = r.number, conn = r.conn, since = NOW,
      fence = r.fence, expires = r.expires, first = r.first, kept = kept,
    }
    if conn ~= '' or polls then is.conn = conn end
    put(user, is)
  end
  local result = 'BACK'
  if r.letter == 'R' then
    result = 'READY'
  elseif r.letter == 'P' then
    result = 'IN_PROGRESS'
  end
  return result, replaced
end

local reply = { 'OK', '' }
for i = 4, #ARGV, 2 do
  local user, conn = ARGV[i], ARGV[i + 1]
  local r, replaced, new = record_of(user), '', 0
  local result = 'NONE'
  local over = r and r.letter == 'P' and r.expires <= NOW -- even if expire_users has not seen it yet
  if over and mode == 'new' then
    count('expired', 1)
    put(user, nil)
    r, over = nil, false
  end
  if r and mode == 'again' and r.conn ~= conn then
    result = 'STALE'
  elseif over then
    result = 'NONE' -- the slot runs to the end of the leeway: a verifier may allow the token
  elseif r then
    result, replaced = known(user, r, conn)
  elseif mode == 'new' then
    result = newcomer(user, conn)
    new = record_of(user) and 1 or 0
  end
  local is = result ~= 'STALE' and result ~= 'NONE' and record_of(user) or { number = 0, fence = '', expires = 0 }
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = result, string.format('%.0f', is.number), is.fence
  reply[n + 4], reply[n + 5], reply[n + 6] = string.format('%.0f', is.expires), replaced, new
end
close_room()
reply[2] = string.format('%.0f', R.change)
return reply
