-- drop_consumer: forgets a consumer of a stream that holds nothing and was idle for long.
-- KEYS  stream
-- ARGV  consumer group, consumer, idle ms
-- Reply 1 dropped, 0 it holds entries, was active, or is not there
-- A consumer that holds entries is never deleted: they would be found by nobody any more. Twice: it is not there. Goes through when memory is full.
local stream, group, consumer, idle = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
for _, c in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local name, pending, age
  for i = 1, #c, 2 do
    if c[i] == 'name' then name = c[i + 1] elseif c[i] == 'pending' then pending = c[i + 1] elseif c[i] == 'idle' then age = c[i + 1] end
  end
  if name == consumer and pending == 0 and math.max(0, age) >= idle then -- -1: it was not heard of yet
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
    return 1
  end
end
return 0
