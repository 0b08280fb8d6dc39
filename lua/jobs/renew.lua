-- renew: extends the leases of jobs that a worker holds.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  typ       -     the type
--   2  consumer  -     the worker process, as a consumer of the ready stream
--   3  n         jobs  number of jobs
--   then for each job:
--   +1  entry    -  its entry in the ready stream
--   +2  group    -  its group
--   +3  ordinal  n  its ordinal
--   +4  attempt  n  the attempt that the worker holds
--   +5  flag     -  k = the worker knows that it may have lost the job; '' = it does not
-- Reply
--   {position, …}  positions (from 1) of lost jobs: taken back, cancelled or ended
-- The counter lost of load:TYPE counts lost jobs that the worker did not know of. The states say
-- which worker holds a job. So if another consumer has claimed an entry, renew claims it back for
-- the worker.
-- Twice: the second call extends the leases again.
-- Out of memory: goes through.
-- Cost: about 1 µs a job.
local typ, consumer, n = ARGV[1], ARGV[2], tonumber(ARGV[3])
local keep, lost, news = {}, {}, 0
precheck('HLEN', B .. 'load:' .. typ)
precheck('XLEN', B .. 'ready:' .. typ)
allow_oom()
for i = 1, n do
  local at = i * 5 - 1
  local state = call('GETRANGE', B .. 'states:' .. ARGV[at + 1], ARGV[at + 2] * 2, ARGV[at + 2] * 2 + 1)
  local mine = mark(tonumber(ARGV[at + 3]))
  if state == 'I' .. mine or state == 'R' .. mine then
    keep[#keep + 1] = ARGV[at]
  else
    lost[#lost + 1] = i
    if ARGV[at + 4] == '' then news = news + 1 end
  end
end
add(B .. 'load:' .. typ, 'lost', news)
if #keep > 0 then
  keep[#keep + 1] = 'JUSTID'
  call('XCLAIM', B .. 'ready:' .. typ, 'workers', consumer, 0, unpack(keep))
end
return lost
