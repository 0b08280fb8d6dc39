-- retire: deletes a job type, if it has no jobs (waiting, non-ready, ready, in flight) and was not
-- served for long. So types that users invent don't accumulate. A new job creates it again. The
-- type's totals are added to those of retired types in the hash watch.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  typ     -   the type
--   2  latest  ms  the type is deleted if it was last served at or before this time
-- Reply
--   {1}  it was deleted
--   {0}  it has jobs, was served later, or does not exist
-- Twice: the second call answers 0.
-- Out of memory: goes through.
-- Cost: constant.
local typ, latest = ARGV[1], tonumber(ARGV[2])
local served = call('ZSCORE', B .. 'types', typ)
if not served or tonumber(served) > latest then return { 0 } end
local TOTALS = { 'accepted', 'started', 'done', 'failed', 'retried', 'throttled' }
local load = call('HMGET', B .. 'load:' .. typ, 'waiting', 'non_ready', unpack(TOTALS))
if tonumber(load[1] or 0) ~= 0 or tonumber(load[2] or 0) ~= 0 then return { 0 } end
if call('XLEN', B .. 'ready:' .. typ) > 0 then return { 0 } end
precheck('HLEN', B .. 'watch')
call('ZREM', B .. 'types', typ)
for i, total in ipairs(TOTALS) do add(B .. 'watch', total, tonumber(load[2 + i] or 0)) end
call('UNLINK', B .. 'load:' .. typ, B .. 'ready:' .. typ, B .. 'fair:' .. typ, B .. 'rate-limited:' .. typ,
  B .. 'fair:' .. typ .. ':high', B .. 'fair:' .. typ .. ':normal', B .. 'fair:' .. typ .. ':low',
  B .. 'over:' .. typ .. ':high', B .. 'over:' .. typ .. ':normal', B .. 'over:' .. typ .. ':low',
  B .. 'priority:' .. typ .. ':high', B .. 'priority:' .. typ .. ':normal', B .. 'priority:' .. typ .. ':low')
return { 1 }
