-- renew: extends leases to their full length from now on.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  lease_ms  ms  the full length; 0 = as in the spec
--   then, for each of at most 200 leases:
--   +1  call   -  call id
--   +2  fence  -  the lease's fence
-- Reply
--   {of_lease, ..., at}  OK, or LOST: it has ended, because it expired, was released or taken back,
--                        or the guard is gone. at: guard time, µs
-- Twice: the second call extends again.
-- Out of memory: goes through.
-- Cost: some commands per lease.
local lease_ms = tonumber(ARGV[1])
open()
local reply = {}
if G.spec then
  allow_oom()
  maintain()
  if lease_ms == 0 then lease_ms = SPEC.lease end
end
for i = 2, #ARGV, 2 do
  local lease = G.spec and read_lease(ARGV[i])
  if lease and lease.fence == ARGV[i + 1] then
    claim(ARGV[i], lease, lease_ms)
    reply[#reply + 1] = 'OK'
  else
    reply[#reply + 1] = 'LOST'
  end
end
if G.spec then
  serve()
  close()
end
reply[#reply + 1] = NOW
return reply
