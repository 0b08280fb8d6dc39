-- set_endpoint: stores or deletes the callback endpoint of a tenant, if nobody has changed it meanwhile.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  tenant  -  the tenant
--   2  old     -  what the caller has read, '' = none
--   3  new     -  the endpoint as JSON, '' = none
-- Reply
--   {'OK'}       stored
--   {'CHANGED'}  it is not as the caller has read it: read it again
-- Twice: the second call changes nothing, and may answer CHANGED.
-- Out of memory: goes through.
-- Cost: constant.
if (call('HGET', B .. 'endpoints', ARGV[1]) or '') ~= ARGV[2] then return { 'CHANGED' } end
allow_oom()
if ARGV[3] == '' then
  call('HDEL', B .. 'endpoints', ARGV[1])
else
  call('HSET', B .. 'endpoints', ARGV[1], ARGV[3])
end
return { 'OK' }
