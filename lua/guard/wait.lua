-- wait: claims the grants of waiting calls, and records that their client is alive.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  client  -  client id
--   then, for each of at most 1,000 calls:
--   +1  call  -  call id
-- Reply
--   {of_call, ..., next, at}  next: ms until the first cooling member can be lent or the first
--                             lease ends (0 = call again now, -1 = neither); at: guard time, µs.
--                             of_call is one of:
--   {'GRANTED', fence, member, generation, probe, lease}
--                             the lease, now claimed, at its full length; lease: that length, ms
--   {'QUEUED', position}      still in the queue; the first position is 1
--   {'GONE'}                  neither in the queue nor granted
-- Twice: the second call answers the same.
-- Out of memory: goes through.
-- Cost: some commands per call.
local client = ARGV[1]
open()
local reply = {}
if not G.spec then
  for i = 2, #ARGV do reply[i - 1] = { 'GONE' } end
  reply[#reply + 1] = -1
  reply[#reply + 1] = NOW
  return reply
end
precheck_guard()
allow_oom()
flush()
call('ZADD', B .. 'clients', whole(MS), client)
touched('clients')
maintain()
serve()
for i = 2, #ARGV do
  local id = ARGV[i]
  local lease = read_lease(id)
  local position = not lease and call('ZRANK', B .. 'queue', id)
  if lease then
    claim(id, lease, SPEC.lease)
    reply[i - 1] = { 'GRANTED', lease.fence, lease.member, lease.generation, lease.probe, SPEC.lease }
  elseif position then
    reply[i - 1] = { 'QUEUED', position + 1 }
  else
    reply[i - 1] = { 'GONE' }
  end
end
reply[#reply + 1] = next_ms()
reply[#reply + 1] = NOW
close()
return reply
