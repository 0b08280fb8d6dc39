-- expire_users: removes users whose time is over: away users after their grace, users who do not
-- poll any more, no-shows, and users with an expired token. It also stores the time of this run.
-- State: A, W (polls), R, P → nobody
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id, empty: only store the time of the run
-- Reply
--   {n, wait, at, mode, no_shows}
--        n         users whom this call has removed
--        wait, at, mode
--                  as in the reply of promote_users
--        no_shows  those of n who were promoted and did not claim the token
-- If expire_users did not run for more than 5 s, Redis or all brokers stood still. Then absent
-- users (away or polling) and READY users keep their places for another 15 s, because they could
-- not return meanwhile. Tokens end as usual. If the clock has stepped back by more than 1 s, the
-- events with a later time in rooms, up to 5,000, are due at once. The next call for an event sets
-- the times of absent users (grace, at least 60 s) and of READY users to at most their full length;
-- it stops after 500 to 1,000 users of each kind.
-- Twice: removes the next users.
-- Out of memory: goes through.
-- Cost: some µs a user; removes at most 200 users.
local event = ARGV[1]
local STOOD_STILL, HOLD, STEP, MOST, MANY = 5000, 15000, 1000, 200, 5000
local known = open_room(event)
local clean, rooms = B .. 'cleanup', B .. 'rooms'
local c = call('HMGET', clean, 'last_run', 'steps')
local last, steps = tonumber(c[1] or NOW), tonumber(c[2] or 0)
local now = string.format('%.0f', NOW)
R.hold = math.min(R.hold, NOW + HOLD)
if NOW - last > STOOD_STILL then R.hold = NOW + HOLD end
allow_oom()
if last - NOW > STEP then
  steps = steps + 1
  local never = string.format('(%.0f', NEVER)
  for _, later in ipairs(call('ZRANGEBYSCORE', rooms, '(' .. now, never, 'LIMIT', 0, MANY)) do
    call('ZADD', rooms, now, later)
  end
  wake('promoter')
end
call('HSET', clean, 'last_run', now, 'hold_until', string.format('%.0f', R.hold), 'steps', steps)
if not known then
  if event ~= '' then call('ZREM', rooms, event) end
  return { 0, -1, NOW, '', 0 }
end

-- shorten lowers the end times of users in the set key to `most` (ms), where they are later: after
-- the clock was set back they would be too far in the future. With `ready` it does so for READY
-- users, otherwise for waiting and away ones. It reads pages of 500 users, MANY users at most, and
-- stops after the page in which its changes reach 500.
local function shorten(key, most, ready)
  local n, page = 0, 500
  for from = 0, MANY - page, page do
    local late = call('ZRANGEBYSCORE', key, string.format('(%.0f', most), '+inf', 'LIMIT', from, page)
    load_users(late, 1, 1)
    for _, user in ipairs(late) do
      local r = record_of(user)
      if r and (r.letter == 'R') == ready and r.letter ~= 'P' then
        n = n + 1
        put(user, {
          letter = r.letter, number = r.number, conn = r.conn, since = r.since, fence = r.fence,
          expires = ready and most or 0, first = 0, kept = most,
        })
      end
    end
    if #late < page or n >= page then return end
  end
end
if R.steps ~= steps then
  shorten(AWAY, NOW + math.max(R.grace, 60000), false)
  shorten(SLOTS, NOW + R.ready, true)
  call('HSET', ROOM, 'steps', steps)
end

local n, no_shows = 0, 0
if R.hold <= NOW then
  local away = call('ZRANGEBYSCORE', AWAY, '-inf', NOW, 'LIMIT', 0, MOST)
  load_users(away, 1, 1)
  for _, user in ipairs(away) do
    local r = record_of(user)
    if not r then
      local number = call('ZSCORE', WAITING, user)
      r = lost(user, number and 'W' or 'A', number)
    end
    if r.letter == 'A' or r.letter == 'W' and r.conn == '' then
      put(user, nil)
      n = n + 1
    else
      drop(AWAY, user)
    end
  end
  count('expired', n)
end
-- During a hold READY users stay in the set although their time is over. They are at its head, so
-- more users are read then, to reach the tokens that have expired.
local over = call('ZRANGEBYSCORE', SLOTS, '-inf', NOW, 'LIMIT', 0, R.hold > NOW and 5 * MOST or MOST)
load_users(over, 1, 1)
for _, user in ipairs(over) do
  local r = record_of(user) or lost(user, 'P')
  if r.letter == 'W' or r.letter == 'A' then
    drop(SLOTS, user)
  elseif n < MOST and (r.letter == 'P' or R.hold <= NOW) then
    put(user, nil)
    n = n + 1
    if r.letter == 'R' then
      no_shows = no_shows + 1
    else
      count('expired', 1)
    end
  end
end
count('no_shows', no_shows)
local wait = close_room()
return { n, wait, NOW, R.mode, no_shows }
