-- drop_consumer: deletes a consumer of a Redis stream, if no entries are pending for it and it was
-- idle for long.
--
-- KEYS
--   1  stream  the stream
-- ARGV
--   1  group     -   the consumer group
--   2  consumer  -   the consumer
--   3  idle      ms  least time since it last tried to read or to claim
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
  local has = {}
  for i = 1, #c, 2 do has[c[i]] = c[i + 1] end
  -- in miniredis, idle is -1 if it has not read yet
  if has.name == consumer and has.pending == 0 and math.max(0, has.idle) >= idle then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
    return 1
  end
end
return 0
