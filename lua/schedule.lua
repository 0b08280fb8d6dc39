-- schedule: groups whose run_at has come enter the fair queue.
-- KEYS  base
-- ARGV  most groups
-- Reply {groups released, ms until the next one or -1}
-- Twice: a group that was released is not in the schedule any more. Goes through when memory is full.
local most = tonumber(ARGV[1])
local now = now_ms()
local due = call('ZRANGEBYSCORE', B .. 'scheduled', '-inf', now, 'LIMIT', 0, most)
if #due > 0 then
  pass_oom()
  for _, group in ipairs(due) do
    local key = B .. 'group:' .. group
    local g = call('HMGET', key, 'tenant', 'lane', 'types', 'status')
    if g[1] and g[4] ~= 'CANCELLED' then
      local waiting = 0
      for typ in string.gmatch(g[3] or '', '[^|]+') do
        local n = call('LLEN', B .. 'queue:' .. group .. ':' .. typ)
        if n > 0 then enqueue(typ, g[2], g[1], group, n, now) end
        waiting = waiting + n
      end
      activate(g[1], waiting)
    end
    call('ZREM', B .. 'scheduled', group)
  end
  wake('fetcher')
end
local first = call('ZRANGE', B .. 'scheduled', 0, 0, 'WITHSCORES')
return { #due, #first > 0 and math.max(0, tonumber(first[2]) - now) or -1 }
