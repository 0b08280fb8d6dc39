-- policy: sets the order of waiting jobs. With a factor it is the priority formula over all groups
-- of a lane: the script ranks the open groups, a batch in each call. Without a factor it is the
-- fair queue: the script deletes all ranks.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  factor  n       ALPHA of the formula, '' = the fair queue
--   2  from    ms      rank groups that were created, or reopened, at or after this time; 0 =
--                      begin: store the factor first
--   3  most    groups  most groups to read, and with them all that were created in the same ms as
--                      the last one
-- Reply
--   {1, from}  more groups are left: call again with this from
--   {0}        all groups are ranked, or the fair queue is set
-- Paused and scheduled groups are not ranked: they are ranked when they enter the fair queue. The
-- hash rate has '?' in the field ranked until all groups are ranked, then the factor: a process
-- that finds '?' begins again.
-- Twice: the second call ranks the same groups by what they are then.
-- Out of memory: refused, except for a change to the fair queue.
-- Cost: some µs a group.
local factor, from, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
precheck('HLEN', B .. 'rate')
local types = call('ZRANGE', B .. 'types', 0, -1)
precheck_rerank(table.concat(types, '|'), 0)
if not factor then allow_oom() end
if from == 0 then
  call('HSET', B .. 'rate', 'ranked', '?')
  if factor then call('SET', B .. 'policy', ARGV[1]) else call('UNLINK', B .. 'policy') end
end
if not factor then
  for _, typ in ipairs(types) do
    for _, lane in ipairs(LANES) do call('UNLINK', B .. 'priority:' .. typ .. ':' .. lane) end
  end
  call('HSET', B .. 'rate', 'ranked', '')
  return { 0 }
end
-- A batch is a range of creation times, because groups end in the meantime. Groups that were
-- created in the same ms are in the same batch.
local page = call('ZRANGEBYSCORE', B .. 'open', from, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local full, last = #page / 2 >= most, page[#page]
if full then page = call('ZRANGEBYSCORE', B .. 'open', from, last, 'WITHSCORES') end
for i = 1, #page, 2 do
  local group = page[i]
  local g = call('HMGET', B .. 'group:' .. group, 'types', 'paused', 'status')
  if g[1] and not g[2] and g[3] ~= 'CANCELLED' and not call('ZSCORE', B .. 'scheduled', group) then
    local score, lane = rank(group, factor)
    for typ in string.gmatch(g[1], '[^|]+') do
      if call('LLEN', B .. 'queue:' .. group .. ':' .. typ) > 0 then
        call('ZADD', B .. 'priority:' .. typ .. ':' .. lane, score, group)
      end
    end
  end
end
if not full then
  call('HSET', B .. 'rate', 'ranked', ARGV[1])
  return { 0 }
end
return { 1, string.format('%.0f', tonumber(last) + 1) }
