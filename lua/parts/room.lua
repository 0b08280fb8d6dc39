-- room: an event of the waiting room: its users, its slots, and when something is due there.
-- lua/room/README.md describes records and states. A script calls open_room, loads users, puts
-- their new records, and ends with close_room, which writes users, moves and the event. drop and
-- spend_permits write at once. So does permits after a step back of the clock or after a change of
-- rate or burst, as left in part limiters. Some scripts write other keys themselves.
-- NEEDS  base, limiters, signals
-- OFFERS
--   R                        the event: settings and state, as open_room has read them
--   NOW                      Redis time, ms
--   ROOM, WAITING, AWAY, SLOTS, USERS
--                            keys of the event
--   open_room(event)         reads the event; false if there is none. It writes nothing
--   free_slots()             slots that nobody holds, as far as the event's limit allows
--   permits()                admissions that the rate allows now (NEVER = no rate is set), and the
--                            time (ms) of the next one
--   spend_permits(n)         takes n of them; permits must have been called before
--   load_users(list, from, step)
--                            reads the records of the users list[from], list[from + step], …
--   record_of(user)          the record of a loaded user, or nil
--   lost(user, letter, number)
--                            what a loaded user counts as who is in a set, but has no readable
--                            record
--   drop(key, user)          removes a user from a set that the user's record contradicts
--   put(user, record)        gives a user a new record; nil: none
--   next_fence()             a fence that was never used before
--   left_queue(number)       notes a number that leaves the queue. put does so by itself
--   inside(record)           whether the user has a slot
--   lowest(key)              the lowest score of a sorted set, or NEVER
--   NEVER                    the score in rooms of an event in which nothing will be due
--   count(name, n)           adds to a counter of the event
--   instance_of(conn)        the instance of the broker that made a conn, or nil
--   close_room()             writes; returns the ms until something is due, -1 = never

local ROOM, WAITING, AWAY, SLOTS, USERS, NOW, R
local FIELDS = {
  'rev', 'mode', 'capacity', 'stock', 'rate', 'burst', 'max_waiting', 'token_ttl', 'leeway',
  'max_session', 'ready', 'grace', 'on_close', 'no_show', 'retention', 'closed', 'tail', 'change',
  'fence', 't', 'steps',
}
local NEVER = 9007199254740991 -- a score holds this and each lower integer exactly

local users, touched = {}, {} -- by user: its record as it was and as it is; users with a new record
local gone, counts = {}, {}   -- numbers that leave the queue; additions to counters
local limit                   -- state of the limiter

local function open_room(event)
  ROOM = B .. 'room:' .. event
  WAITING, AWAY, SLOTS, USERS = ROOM .. ':waiting', ROOM .. ':away', ROOM .. ':slots', ROOM .. ':users'
  US = now_us()
  NOW = floor(US / 1000)
  local h = call('HMGET', ROOM, unpack(FIELDS))
  for i = 1, #h do h[i] = h[i] or nil end
  R = {
    event = event, rev = h[1], mode = h[2], capacity = tonumber(h[3]), stock = tonumber(h[4]),
    rate = tonumber(h[5]), max_waiting = tonumber(h[7]), token_ttl = tonumber(h[8]),
    leeway = tonumber(h[9]), max_session = tonumber(h[10]), ready = tonumber(h[11]),
    grace = tonumber(h[12]), on_close = h[13], no_show = h[14], retention = tonumber(h[15]),
    closed = tonumber(h[16] or 0), tail = tonumber(h[17] or 0), change = tonumber(h[18] or 0),
    fence = tonumber(h[19] or 0), limiter_state = h[20], steps = tonumber(h[21] or 0),
    waiting = call('ZCARD', WAITING), used = call('ZCARD', SLOTS), users = call('HLEN', USERS),
    -- hold is the time (ms) until which absent users keep their places, because expire_users did
    -- not run for a while.
    hold = tonumber(call('HGET', B .. 'cleanup', 'hold_until') or 0),
  }
  WIDTH, BURST = 1000, tonumber(h[6])
  precheck('ZCARD', AWAY, B .. 'rooms')
  precheck('XLEN', B .. 'entry', B .. 'moves')
  precheck('LLEN', B .. 'wake:promoter')
  return R.rev ~= nil
end

local function free_slots()
  return math.max(0, math.min(R.capacity, R.stock or R.capacity) - R.used)
end

local function permits()
  if not R.rate then return NEVER, NOW end
  local n, next_at, state = left.token(ROOM, R.limiter_state, nil, R.rate)
  limit = state
  return n, math.ceil(next_at / 1000)
end
local function spend_permits(n)
  if not R.rate or n == 0 then return end
  spend.token(ROOM, limit, n)
  R.limiter_state = limit.at
end

-- A record is letter|number|conn|since|fence|expires|first. The record tells the sets of a user.
-- The score in away is not in the record: put needs it in kept. expires of a READY user is the end
-- of the slot.
local function decode(text)
  local letter, number, conn, since, fence, expires, first =
    string.match(text, '^([WARP])|(%d+)|([^|]*)|(%d*)|(%d*)|(%d*)|(%d*)$')
  if not letter then return nil end
  return {
    letter = letter, number = tonumber(number), conn = conn, since = tonumber(since) or 0,
    fence = fence, expires = tonumber(expires) or 0, first = tonumber(first) or 0,
    kept = -1, -- not known
  }
end
local function encode(r)
  return string.format('%s|%.0f|%s|%.0f|%s|%s|%s', r.letter, r.number, r.conn, r.since, r.fence,
    r.expires > 0 and string.format('%.0f', r.expires) or '',
    r.first > 0 and string.format('%.0f', r.first) or '')
end

local function load_users(list, from, step)
  local ids = {}
  for i = from, #list, step do
    if not users[list[i]] then
      ids[#ids + 1] = list[i]
      users[list[i]] = {}
    end
  end
  if #ids == 0 then return end
  local texts = call('HMGET', USERS, unpack(ids))
  for i, user in ipairs(ids) do
    local r = texts[i] and decode(texts[i]) or nil
    users[user].was, users[user].is = r, r
  end
end
local function record_of(user) return users[user].is end

-- lost is for a loaded user who is in a set but has no readable record, because another program has
-- written or deleted it: it returns the record that the set implies. The user's first put then
-- corrects all sets. If a record is readable, it is right, and drop removes the user from a set
-- that contradicts it.
local function lost(user, letter, number)
  local u = users[user]
  u.lost = true
  u.is = {
    letter = letter, number = tonumber(number or 0), conn = '', since = NOW, fence = '', expires = 0, first = 0,
    kept = -1,
  }
  return u.is
end
local function drop(key, user)
  call('ZREM', key, user)
  if key == WAITING then R.waiting = R.waiting - 1 end
  if key == SLOTS then R.used = R.used - 1 end
end

local function queued(r) return r and (r.letter == 'W' or r.letter == 'A') end
local function inside(r) return r and (r.letter == 'R' or r.letter == 'P') end

local function left_queue(number) gone[#gone + 1] = number end

-- put gives a user a new record. A record that is away or polls needs the field kept: the time (ms)
-- until which the place is kept.
local function put(user, r)
  local u = users[user]
  if queued(u.is) and not queued(r) and u.is.number > 0 then left_queue(u.is.number) end
  R.used = R.used + (inside(r) and 1 or 0) - (inside(u.is) and 1 or 0)
  R.waiting = R.waiting + (r and r.letter == 'W' and 1 or 0) - (u.is and u.is.letter == 'W' and 1 or 0)
  R.users = R.users + (r and 1 or 0) - (u.is and 1 or 0)
  if not u.noted then
    u.noted = true
    touched[#touched + 1] = user
  end
  u.is = r
end

local function next_fence()
  R.fence = math.max(R.fence + 1, US) -- time: a fence stays unique when Redis has lost its data
  return string.format('%.0f', R.fence)
end

local function count(name, n)
  if n ~= 0 then counts[name] = (counts[name] or 0) + n end
end

local function instance_of(conn) return string.match(conn, '^(.+)%.[^.]*$') end

-- ranges sorts numbers and returns them as text: "first count …", a pair for each range.
local function ranges(numbers)
  table.sort(numbers)
  local all, first, n = {}, numbers[1], 1
  for i = 2, #numbers + 1 do
    if numbers[i] == first + n then
      n = n + 1
    else
      all[#all + 1] = string.format('%.0f %d', first, n)
      first, n = numbers[i], 1
    end
  end
  return table.concat(all, ' ')
end

-- scores returns the scores that a user with the record r has in the sorted sets waiting, away and
-- slots of the event; nil where the user is not in the set.
local function scores(r)
  if not r then return nil, nil, nil end
  if r.letter == 'W' then return r.number, r.conn == '' and r.kept or nil, nil end
  if r.letter == 'A' then return nil, r.kept, nil end
  return nil, nil, r.letter == 'P' and r.expires + R.leeway or r.expires
end

-- write_users adds the changed users to their new sets before it removes them from the old ones.
local function write_users()
  local keys, adds, rems, records, deleted = { WAITING, AWAY, SLOTS }, { {}, {}, {} }, { {}, {}, {} }, {}, {}
  for _, user in ipairs(touched) do
    local is = users[user].is
    local before, now = { scores(users[user].was) }, { scores(is) }
    if users[user].lost then before = { 0, 0, 0 } end
    for i = 1, 3 do
      if now[i] and not (i == 1 and now[i] == before[i]) then -- a record does not tell all scores
        local list = adds[i]
        list[#list + 1], list[#list + 2] = string.format('%.0f', now[i]), user
      elseif before[i] and not now[i] then
        rems[i][#rems[i] + 1] = user
      end
    end
    if is then
      records[#records + 1], records[#records + 2] = user, encode(is)
    else
      deleted[#deleted + 1] = user
    end
  end
  if #records > 0 then call('HSET', USERS, unpack(records)) end
  for i, key in ipairs(keys) do
    if #adds[i] > 0 then call('ZADD', key, unpack(adds[i])) end
  end
  for i, key in ipairs(keys) do
    if #rems[i] > 0 then call('ZREM', key, unpack(rems[i])) end
  end
  if #deleted > 0 then call('HDEL', USERS, unpack(deleted)) end
end

-- lowest returns the lowest score of a sorted set, or NEVER.
local function lowest(key)
  return tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or NEVER)
end

-- due returns the time (ms) at which the brokers have to do something next in the event; NEVER:
-- nothing.
local function due()
  local kept, held = lowest(AWAY), lowest(SLOTS)
  local ends = math.min(kept, held)
  if ends <= NOW and R.hold > NOW then
    ends = math.min(NOW + 1000, R.hold) -- tokens end meanwhile: look again each second
  end
  if R.mode == 'closed' or R.mode == 'sold_out' then
    if R.waiting > 0 or kept ~= NEVER then return NOW end
    if R.used > 0 then return ends end
    return R.closed + R.retention
  end
  local at = NEVER
  if R.mode == 'open' and R.waiting > 0 and free_slots() > 0 then
    local n, next_at = permits()
    if n > 0 then return NOW end
    at = next_at
  end
  return math.min(at, ends)
end

-- close_room writes the counters first, because that write adds data: when memory is full, Redis
-- refuses it, and enter has changed nothing. With another first write enter could delete a user
-- before it is refused.
local function close_room()
  for name, n in pairs(counts) do call('HINCRBY', ROOM, name, n) end
  write_users()
  if #gone > 0 then
    R.change = R.change + 1
    call('XADD', B .. 'moves', 'MAXLEN', '~', 10000, '*', 'event', R.event,
      'change', string.format('%.0f', R.change), 'gone', ranges(gone))
  end
  if #touched > 0 then
    call('HSET', ROOM, 'tail', string.format('%.0f', R.tail), 'change', string.format('%.0f', R.change),
      'fence', string.format('%.0f', R.fence))
  end
  local at = math.max(NOW, due()) -- not earlier: events that are due take turns
  call('ZADD', B .. 'rooms', string.format('%.0f', at), R.event)
  if at <= NOW then wake('promoter') end
  return at == NEVER and -1 or math.max(0, at - NOW)
end
