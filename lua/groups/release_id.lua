-- release_id: deletes the owner key of a group, if the group is the tenant's.
--
-- KEYS
--   1  base    prefix of all keys of the partition of the id, which need not be that of the group
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group   -  the group's id
--   2  tenant  -  whose group it was
-- Reply
--   {'OK'}     the id is free
--   {'OTHER'}  another tenant has it
-- Twice: OK again.
-- Out of memory: goes through.
-- Cost: constant.
local owner = B .. 'owner:' .. ARGV[1]
local is = call('GET', owner)
if is and is ~= ARGV[2] then return { 'OTHER' } end
call('DEL', owner)
return { 'OK' }
