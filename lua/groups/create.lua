-- create: creates a group without jobs.
-- State: (no group) → CREATED
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group   -  the group's id
--   2  tenant  -  its tenant
--   3  typ     -  the type of jobs that name none
--   4  hash    -  digest of the submission, by which a repetition is recognized
--   then for each further field of the group's hash:
--   +1  field  -  its name
--   +2  value  -  its value
-- Reply
--   {'OK', status}        the group was created, by this or an earlier call; status is its present
--                         one
--   {'CONFLICT', status}  another submission created the group
-- Twice: the second call answers OK and changes nothing.
-- Out of memory: refused.
-- The group's hash is written last, because it is what says that the group exists: a script that
-- loses a right in between leaves an id on lists, which a second call completes and the audit finds.
-- Cost: constant.
local group, tenant, typ, hash = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = B .. 'group:' .. group
local have = call('HMGET', key, 'hash', 'status')
if have[1] == hash then return { 'OK', have[2] } end
if have[1] then return { 'CONFLICT', have[2] or '' } end
precheck('ZCARD', B .. 'groups', B .. 'groups:' .. tenant, B .. 'open', B .. 'tenants')
precheck_announce()

local now = string.format('%.0f', now_ms())
local set = {
  'id', group, 'tenant', tenant, 'type', typ, 'hash', hash, 'status', 'CREATED', 'round', '1', 'at:created', now,
}
for i = 5, #ARGV do set[#set + 1] = ARGV[i] end
call('ZADD', B .. 'groups', now, group)
call('ZADD', B .. 'groups:' .. tenant, now, group)
call('ZADD', B .. 'open', now, group)
call('ZADD', B .. 'tenants', 0, tenant)
announce(group, 1, { 'CREATED', now }, set)
call('HSET', key, unpack(set))
return { 'OK', 'CREATED' }
