-- create: a group comes into being.  (nothing) → CREATED
-- KEYS  base
-- ARGV  group, tenant, type, content hash, then pairs of field and value of the group's hash
-- Reply {'OK'} | {'SAME', status} the same content was created before | {'CONFLICT'} other content under this id
-- Twice: the second call answers SAME. Refused when memory is full. Cost: constant.
local group, tenant, typ, hash = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = B .. 'group:' .. group
local have = call('HMGET', key, 'hash', 'status')
if have[1] then
  if have[1] == hash then return { 'SAME', have[2] } end
  return { 'CONFLICT', have[2] or '' }
end
precheck('ZCARD', B .. 'groups', B .. 'groups:' .. tenant, B .. 'open', B .. 'tenants')
precheck('XLEN', B .. 'outbox')
precheck('LLEN', B .. 'wake:watcher')

local now = now_ms()
local set = { 'id', group, 'tenant', tenant, 'type', typ, 'hash', hash, 'status', 'CREATED', 'round', 1, 'at:created', now }
for i = 5, #ARGV do set[#set + 1] = ARGV[i] end
call('HSET', key, unpack(set))
call('ZADD', B .. 'groups', now, group)
call('ZADD', B .. 'groups:' .. tenant, now, group)
call('ZADD', B .. 'open', now, group)
call('ZADD', B .. 'tenants', 0, tenant)
call('XADD', B .. 'outbox', '*', 'group', group, 'status', 'CREATED', 'round', 1, 'at', now, 'snapshot', cjson.encode(call('HGETALL', key)))
wake('watcher')
return { 'OK', 'CREATED' }
