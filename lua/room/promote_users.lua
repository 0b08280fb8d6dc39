-- promote_users: gives free slots of an open event, as fast as its rate allows, to the waiting
-- users with the lowest numbers.
-- State: W → R
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
--   2  most   n  most users to promote, at most 200
-- Reply
--   {n, wait, at, mode}
--        n     users who were promoted
--        wait  ms until something is due in the event, -1 = never
--        at    Redis time, ms
--        mode  of the event, empty: there is no such event
-- For each broker with promoted users the script adds messages entry.promoted to the Redis stream
-- entry, each with at most 100 users. Users who poll are in none: their next call of enter answers
-- READY.
-- Twice: promotes the next users.
-- Out of memory: goes through.
-- Cost: some µs a user.
local event, most = ARGV[1], tonumber(ARGV[2])
local known = open_room(event)
if not known then
  allow_oom()
  call('ZREM', B .. 'rooms', event)
  return { 0, -1, NOW, '' }
end
allow_oom()
local n = 0
if R.mode == 'open' and R.waiting > 0 and free_slots() > 0 then
  n = math.max(0, math.min(free_slots(), R.waiting, most, (permits())))
end
local by_instance, instances = {}, {}

local function promote(user, r)
  local fence = next_fence()
  put(user, {
    letter = 'R', number = r.number, conn = r.conn, since = r.since, fence = fence,
    expires = NOW + R.ready, first = 0,
  })
  local to = instance_of(r.conn)
  if not to then return end
  if not by_instance[to] then
    by_instance[to] = {}
    instances[#instances + 1] = to
  end
  local list = by_instance[to]
  list[#list + 1] = string.format('{"user":"%s","conn":"%s","fence":%s,"until":%.0f}', user, r.conn, fence,
    NOW + R.ready)
end

if n > 0 then
  local first = call('ZRANGE', WAITING, 0, n - 1, 'WITHSCORES')
  load_users(first, 1, 2)
  n = 0
  for i = 1, #first, 2 do
    local user = first[i]
    local r = record_of(user) or lost(user, 'W', first[i + 1])
    if r.letter == 'W' then
      promote(user, r)
      n = n + 1
    else
      drop(WAITING, user)
    end
  end
  spend_permits(n)
  count('promoted', n)
end
local wait = close_room()
for _, to in ipairs(instances) do
  local list = by_instance[to]
  for from = 1, #list, 100 do
    call('XADD', B .. 'entry', '*', 'type', 'entry.promoted', 'data',
      string.format('{"event":"%s","to":"%s","users":[%s]}', event, to,
        table.concat(list, ',', from, math.min(from + 99, #list))))
  end
end
return { n, wait, NOW, R.mode }
