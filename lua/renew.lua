-- renew: a worker keeps the leases of jobs that it holds.
-- KEYS  base
-- ARGV  type, consumer, n jobs, then for each: entry, group, ordinal, attempt
-- Reply the positions (from 1) of jobs that are lost: taken back, cancelled or ended; load.lost counts them
-- The states say who owns a job, so a lease that was stolen comes back. Twice: the same. Goes through when memory is full. Cost: about 1 µs a job.
local typ, consumer, n = ARGV[1], ARGV[2], tonumber(ARGV[3])
local keep, lost = {}, {}
see('HLEN', B .. 'load:' .. typ)
see('XLEN', B .. 'ready:' .. typ)
pass_oom()
for i = 1, n do
  local at = i * 4
  local state = call('GETRANGE', B .. 'states:' .. ARGV[at + 1], ARGV[at + 2] * 2, ARGV[at + 2] * 2 + 1)
  local mine = mark(tonumber(ARGV[at + 3]))
  if state == 'I' .. mine or state == 'R' .. mine then keep[#keep + 1] = ARGV[at] else lost[#lost + 1] = i end
end
if #lost > 0 then call('HINCRBY', B .. 'load:' .. typ, 'lost', #lost) end
if #keep > 0 then
  keep[#keep + 1] = 'JUSTID'
  call('XCLAIM', B .. 'ready:' .. typ, 'workers', consumer, 0, unpack(keep))
end
return lost
