-- release: ends leases with their outcomes, and grants the members to the next waiters. It also
-- cancels calls that wait.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  n  n  number of leases, at most 200
--   then, for each lease:
--   +1  call     -   call id
--   +2  fence    -   the lease's fence; empty = cancel the call, whether it waits or was granted
--   +3  outcome  -   s success, f failure, n neutral, t throttled, u unused
--   +4  delay    ms  t: for how long the member may not be lent, at most 24 hours
-- Reply
--   {of_lease, ..., next, at}  next: ms until the first cooling member can be lent or the first
--                              lease ends (0 = call again now, -1 = neither); at: guard time, µs.
--                              of_lease is one of:
--   {'OK', breaker, changed}   ended. breaker: the member's, C, O or H; changed: 1 if the end of
--                              this lease has changed it
--   {'GONE'}                   there is no such lease: released before, expired or taken back; or
--                              no such call to cancel
--   {'LEFT'}                   the call has left the queue
--   {'GIVEN'}                  the call had been granted; its lease has ended unused
-- Twice: the second call answers GONE.
-- Out of memory: goes through.
-- Cost: some commands per lease.
local n = tonumber(ARGV[1])
open()
local reply = {}
if not G.spec then
  for i = 1, n do reply[i] = { 'GONE' } end
  reply[n + 1] = -1
  reply[n + 2] = NOW
  return reply
end
allow_oom()
maintain()
for i = 1, n do
  local id, fence, outcome = ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i]
  local lease = read_lease(id)
  if fence == '' then
    if remove_waiter(id) then
      reply[i] = { 'LEFT' }
    elseif lease then
      local _, _, stale = end_lease(id, lease, 'u', 0)
      if stale then count('stale') end
      reply[i] = { 'GIVEN' }
    else
      reply[i] = { 'GONE' }
    end
  elseif lease and lease.fence == fence then
    local breaker, changed, stale = end_lease(id, lease, outcome, tonumber(ARGV[4 * i + 1]))
    if stale then count('stale') end
    reply[i] = { 'OK', breaker, changed and 1 or 0 }
  else
    reply[i] = { 'GONE' }
  end
end
serve()
reply[n + 1] = next_ms()
reply[n + 2] = NOW
close()
return reply
