-- inspect: reads a guard, a page at a time.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  from  n  the first member, lease and waiter of the page, counted from 0
--   2  n     n  how many of each, 0 to 200
-- Reply
--   {guard, sizes, members, leases, waiters, at}
--        guard    fields and values of the guard's hash
--        sizes    numbers of members, free, cooling, leases, waiters, clients. Members whose time in
--                 cooling is over count as free: the next call moves them
--        members  {id, state, breaker, failures, open_until, held, left, due, used, uses, probes,
--                 good, override}, by declaration and id. state: free, cooling, busy or off; due:
--                 µs from which on a cooling member may be lent, else 0; left: permits, -1 without
--                 a limit; failures: in a row; good: successes of the half-open breaker's probes
--        leases   {call, expiry in guard time (ms), record}, the first to expire first
--        waiters  {call, seq, record}, the first in the queue first
--        at       guard time, µs
-- A nil reply: there is no such guard.
-- Twice: answers again. It writes nothing.
-- Out of memory: goes through.
-- Cost: some commands per member, lease and waiter of the page.
local from, n = tonumber(ARGV[1]), tonumber(ARGV[2])
open()
if not G.spec then return nil end
G.reads = true
local function page(key, record)
  local found = n > 0 and call('ZRANGE', B .. key, from, from + n - 1, 'WITHSCORES') or {}
  local rows = {}
  for i = 1, #found, 2 do
    rows[#rows + 1] = { found[i], found[i + 1], call('HGET', B .. record, found[i]) or '' }
  end
  return rows
end
local members = {}
local ids = n > 0 and call('ZRANGE', B .. 'members', from, from + n - 1) or {}
for _, id in ipairs(ids) do
  local m = load(id)
  if m then
    local state = m.off and 'off' or call('ZSCORE', B .. 'free', id) and 'free'
    local due = call('ZSCORE', B .. 'cooling', id)
    if not state then state = due and 'cooling' or 'busy' end
    members[#members + 1] = {
      id, state, m.breaker, m.fails, whole(m.open_until), m.held,
      m.kind == 'none' and -1 or math.max(0, m.left), due or '0', whole(m.used), m.uses, m.probes,
      m.good, m.override,
    }
  end
end
local sizes = {}
for i, key in ipairs({ 'members', 'free', 'cooling', 'leases', 'queue', 'clients' }) do
  sizes[i] = call('ZCARD', B .. key)
end
local due = call('ZCOUNT', B .. 'cooling', '-inf', whole(NOW))
sizes[2], sizes[3] = sizes[2] + due, sizes[3] - due
return { call('HGETALL', B .. 'guard'), sizes, members, page('leases', 'lease'), page('queue', 'waiters'), NOW }
