-- audit_room: finds the violations of laws in one page of an event. The other scripts keep the
-- laws, so each finding is an effect of another program or of lost data.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event   -  the event's id
--   2  list    -  event, users, waiting, away or slots: what to read
--   3  cursor  -  where the page begins, 0 at first
--   4  most    n  about how many elements, at most 200
-- Reply
--   {cursor, tail, rows, finding, …}
--        cursor   of the next page, 0: the end
--        tail     the last number that was given
--        rows     of the list users: {user, number, fence, …}
--        finding  {law, what, number, have, want}; number: the user's, 0: not known
--     law state: each user is in the sets of the record's state, and in no other
--       settings  settings of the event are missing; have: it has a hash at all, 1 or 0
--       unlisted  the event is not in rooms
--       late      the time in rooms (have) is more than 15 s later than something is due (want)
--       record    a record can't be read
--       sets      have and want are sets: 1 waiting, 2 away, 4 slots, or a sum of them
--       ghost     a user in a set (want) has no record; have: the score
--     law number
--       tail      the number is not one of 1 to tail (want)
--       score     the user waits with another number (have)
--     law slots
--       fence     the fence is missing, or higher than the last one that was given
--       early     the slot (have) ends before the READY user's time or the token (want)
--       seats     seats left (have) are not those declared less those sold (want); -1: no stock
-- It writes nothing. Each page is read at one instant. A user who exists during the whole scan is
-- read at least once.
-- Twice: reads again.
-- Out of memory: goes through.
-- Cost: some µs an element.
local event, list, cursor, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local LATE = 15000 -- ms by which a time in rooms may be too late, as after an error of a script
local known = open_room(event)
local SETS = { waiting = { WAITING, 1 }, away = { AWAY, 2 }, slots = { SLOTS, 4 } }
local tail = R.tail
local rows = {}
local reply = { '0', string.format('%.0f', tail), rows }
local function found(law, what, number, have, want)
  local finding = { law, what }
  for i, n in ipairs({ number or 0, have or 0, want or 0 }) do
    finding[2 + i] = string.format('%.0f', tonumber(n))
  end
  reply[#reply + 1] = finding
end

-- steady says whether the event's time in rooms was written under the present clock: expire_users
-- has run, and no step back of the clock by more than 1 s is still to be corrected.
local function steady()
  local c = call('HMGET', B .. 'cleanup', 'last_run', 'steps')
  return c[1] and tonumber(c[1]) <= NOW + 1000 and tonumber(c[2] or 0) == R.steps
end

local function check_event()
  local whole = R.capacity and R.max_waiting and R.token_ttl and R.leeway and R.max_session and R.ready
    and R.grace and R.retention
  if not known or not whole then
    local hash = call('EXISTS', ROOM)
    if hash + call('EXISTS', WAITING, AWAY, SLOTS, USERS) > 0 then found('state', 'settings', 0, hash) end
    return
  end
  local at, next_at = call('ZSCORE', B .. 'rooms', event), math.min(lowest(AWAY), lowest(SLOTS))
  if R.mode == 'open' and R.waiting > 0 and free_slots() > 0 and not R.rate then next_at = NOW end
  if not at then
    found('state', 'unlisted')
  elseif tonumber(at) > math.max(next_at, NOW) + LATE and steady() then
    found('state', 'late', 0, at, next_at)
  end
  local h = call('HMGET', ROOM, 'declared_stock', 'sold')
  local declared = h[1] and tonumber(h[1])
  local want = declared and math.max(0, declared - tonumber(h[2] or 0)) or -1
  if (R.stock or -1) ~= want then found('slots', 'seats', 0, R.stock or -1, want) end
end

local function check_user(user)
  local waits = call('ZSCORE', WAITING, user)
  local slot = call('ZSCORE', SLOTS, user)
  local r = record_of(user)
  if not r then return found('state', 'record', waits or 0) end
  local have = (waits and 1 or 0) + (call('ZSCORE', AWAY, user) and 2 or 0) + (slot and 4 or 0)
  local holds = inside(r)
  local want = holds and 4 or r.letter == 'A' and 2 or r.conn == '' and 3 or 1
  if have ~= want then found('state', 'sets', r.number, have, want) end
  if not known then return end
  if r.number < 1 or r.number > tail then found('number', 'tail', r.number, 0, tail) end
  if r.letter == 'W' and waits and tonumber(waits) ~= r.number then found('number', 'score', r.number, waits) end
  if not holds then return end
  if r.fence == '' or tonumber(r.fence) > R.fence then found('slots', 'fence', r.number) end
  if slot and tonumber(slot) < r.expires then found('slots', 'early', r.number, slot, r.expires) end
end

if list == 'event' then
  check_event()
elseif list == 'users' then
  local page = call('HSCAN', USERS, cursor, 'COUNT', most)
  reply[1] = page[1]
  load_users(page[2], 1, 2)
  for i = 1, #page[2], 2 do
    local user = page[2][i]
    check_user(user)
    local r = record_of(user)
    if r then
      local n = #rows
      rows[n + 1], rows[n + 2], rows[n + 3] = user, string.format('%.0f', r.number), r.fence
    end
  end
else
  local page = call('ZSCAN', SETS[list][1], cursor, 'COUNT', most)
  reply[1] = page[1]
  local ids = {}
  for i = 1, #page[2], 2 do ids[#ids + 1] = page[2][i] end
  local records = #ids > 0 and call('HMGET', USERS, unpack(ids)) or {}
  for i = 1, #ids do
    if not records[i] then
      local score = call('ZSCORE', SETS[list][1], ids[i])
      found('state', 'ghost', list == 'waiting' and score or 0, score, SETS[list][2])
    end
  end
end
return reply
