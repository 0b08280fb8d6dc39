-- drop_consumer: deletes a stream's consumer, if it holds no entries and was idle for long.
--
-- KEYS
--   1  stream  the stream
-- ARGV
--   1  group     -   the consumer group
--   2  consumer  -   the consumer
--   3  idle      ms  how long it has to be idle
-- Reply
--   1  it was deleted
--   0  it holds entries, was active, or does not exist
-- Never delete a consumer that holds entries: they would leave the pending list and no process
-- would ever find them.
-- Twice: the second call answers 0.
-- Out of memory: goes through.
-- Cost: the number of consumers of the group.
local stream, group, consumer, idle = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
for _, c in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local name, pending, age
  for i = 1, #c, 2 do
    local field, value = c[i], c[i + 1]
    if field == 'name' then name = value elseif field == 'pending' then pending = value end
    if field == 'idle' then age = value end
  end
  if name == consumer and pending == 0 and math.max(0, age) >= idle then -- age -1: it has not read yet
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
    return 1
  end
end
return 0
