-- retire: forgets a job type that nobody has served for long and that holds nothing, so that types that users make up don't pile up.
-- KEYS  base
-- ARGV  type, latest time (ms) at which it may have been served
-- Reply {1} forgotten | {0} it holds jobs, or was served since
-- Twice: it is not there any more. A job of the type brings it back. Goes through when memory is full. Cost: constant.
local typ, latest = ARGV[1], tonumber(ARGV[2])
local served = call('ZSCORE', B .. 'types', typ)
if not served or tonumber(served) > latest then return { 0 } end
local load = call('HMGET', B .. 'load:' .. typ, 'waiting', 'non_ready')
if tonumber(load[1] or 0) ~= 0 or tonumber(load[2] or 0) ~= 0 or call('XLEN', B .. 'ready:' .. typ) > 0 then return { 0 } end
call('ZREM', B .. 'types', typ)
call('UNLINK', B .. 'load:' .. typ, B .. 'ready:' .. typ, B .. 'fair:' .. typ, B .. 'rate-limited:' .. typ,
  B .. 'fair:' .. typ .. ':high', B .. 'fair:' .. typ .. ':normal', B .. 'fair:' .. typ .. ':low',
  B .. 'over:' .. typ .. ':high', B .. 'over:' .. typ .. ':normal', B .. 'over:' .. typ .. ':low', B .. 'priority:' .. typ)
return { 1 }
