-- schedule: groups whose run_at has come enter the fair queue.
-- KEYS  base
-- ARGV  most groups
-- Reply {groups released, ms until the next one or -1}
-- Twice: a group that was released is not in the schedule any more. Goes through when memory is full.
local most = tonumber(ARGV[1])
local now = now_ms()
local due = call('ZRANGEBYSCORE', B .. 'scheduled', '-inf', now, 'LIMIT', 0, most)
if #due > 0 then
  local factor = alpha()
  local ready = {} -- groups that may start, each with the lengths of its queues by type
  for _, group in ipairs(due) do
    local g = call('HMGET', B .. 'group:' .. group, 'tenant', 'lane', 'types', 'status', 'paused')
    if g[1] and g[4] ~= 'CANCELLED' and not g[5] then -- a paused one enters when it is resumed
      local waiting = {}
      for typ in string.gmatch(g[3] or '', '[^|]+') do
        local n = call('LLEN', B .. 'queue:' .. group .. ':' .. typ)
        precheck_enqueue(typ, g[2], g[1])
        if n > 0 then waiting[typ] = n end
      end
      precheck_activate(g[1])
      ready[#ready + 1] = { group, g[1], g[2], waiting }
    end
  end
  precheck('LLEN', B .. 'wake:fetcher')
  allow_oom()
  for _, r in ipairs(ready) do
    local all = 0
    for typ, n in pairs(r[4]) do
      enqueue(typ, r[3], r[2], r[1], n, now, factor)
      all = all + n
    end
    activate(r[2], all)
  end
  call('ZREM', B .. 'scheduled', unpack(due))
  wake('fetcher')
end
local first = call('ZRANGE', B .. 'scheduled', 0, 0, 'WITHSCORES')
return { #due, #first > 0 and math.max(0, tonumber(first[2]) - now) or -1 }
