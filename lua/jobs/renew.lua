-- renew: a worker keeps the leases of jobs that it holds.
-- KEYS  base
-- ARGV  type, consumer, n jobs, then for each: entry, group, ordinal, attempt, flag (k: that it may be lost is known)
-- Reply the positions (from 1) of jobs that are lost: taken back, cancelled or ended; load.lost counts those of which it was not known
-- The states say who owns a job, so a lease that was stolen comes back. Twice: the same. Goes through when memory is full. Cost: about 1 µs a job.
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
