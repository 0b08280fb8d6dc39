-- policy: how the next jobs are chosen: by fair turns, or by the user's priority formula over all groups. On a change, the open groups are ranked again, a chunk a call.
-- KEYS  base
-- ARGV  ALPHA ('' = fair turns), ms of creation from which on groups are ranked (0 = begin), most groups
-- Reply {1 = more to do, ms of creation from which on} | {0}
-- Whoever finds that the ranking was not finished (rate.ranked) begins again. Twice: groups are ranked as they are. Refused when memory is full, but for fair turns. Cost: some µs a group.
local factor, from, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
precheck('HLEN', B .. 'rate')
for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do precheck('ZCARD', B .. 'priority:' .. typ) end
if not factor then allow_oom() end
if from == 0 then
  call('HSET', B .. 'rate', 'ranked', '?')
  if factor then call('SET', B .. 'policy', ARGV[1]) else call('UNLINK', B .. 'policy') end
end
if not factor then
  for _, typ in ipairs(call('ZRANGE', B .. 'types', 0, -1)) do call('UNLINK', B .. 'priority:' .. typ) end
  call('HSET', B .. 'rate', 'ranked', '')
  return { 0 }
end
-- By time of creation, as groups end meanwhile; those of one ms belong to one chunk.
local page = call('ZRANGEBYSCORE', B .. 'open', from, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local full, last = #page / 2 >= most, page[#page]
if full then page = call('ZRANGEBYSCORE', B .. 'open', from, last, 'WITHSCORES') end
for i = 1, #page, 2 do
  local group = page[i]
  local g = call('HMGET', B .. 'group:' .. group, 'types', 'paused', 'status')
  if g[1] and not g[2] and g[3] ~= 'CANCELLED' and not call('ZSCORE', B .. 'scheduled', group) then
    local score = rank(group, factor)
    for typ in string.gmatch(g[1], '[^|]+') do
      if call('LLEN', B .. 'queue:' .. group .. ':' .. typ) > 0 then call('ZADD', B .. 'priority:' .. typ, score, group) end
    end
  end
end
if not full then
  call('HSET', B .. 'rate', 'ranked', ARGV[1])
  return { 0 }
end
return { 1, string.format('%.0f', tonumber(last) + 1) }
