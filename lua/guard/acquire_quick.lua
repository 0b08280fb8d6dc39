-- acquire_quick: the first step of the script acquire. If the guard has no limiter and part quick
-- can serve the call, it does so and ends the script; otherwise acquire_limited follows, which does
-- the same with a limiter. acquire.lua describes the arguments and the reply.

local quick = quick_guard(ARGV[4])

-- quick_acquire grants the call and returns the reply; nil where part guard is needed: then nothing
-- has been written. take is nil or a function that takes a permit of the member: it adds the fields
-- that it changes to a list, and returns false where part guard is needed.
local function quick_acquire(g, take)
  local id, client, member, lease_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[5])
  if ARGV[8] ~= '' and g.now > tonumber(ARGV[8]) or g.ttl > 0 and lease_ms > g.lease then return nil end
  if call('HEXISTS', B .. 'lease', id) == 1 then return nil end
  if member == '' then
    member = call('ZRANGE', B .. 'free', 0, 0)[1]
  elseif not call('ZSCORE', B .. 'free', member) then
    return nil
  end
  local m = member and quick_member(g, member)
  if not m or g.most > 0 and m.held >= g.most then return nil end
  local now = g.now + 1
  local at, fence = quick_text(now), quick_text(math.max(g.fence + 1, g.time))
  local fields = { 'h', m.held + 1, 'u', at, 'uses', m.uses + 1 }
  if take and not take(g, m.key, now, fields) then return nil end
  if lease_ms == 0 then lease_ms = g.lease end
  local ms = floor(g.now / 1000) + lease_ms
  call('HSET', B .. 'guard', 'clk', at, 'fence', fence, 'granted', g.granted + 1)
  call('HSET', m.key, unpack(fields))
  if m.held + 1 == g.most then
    call('ZREM', B .. 'free', member)
  else
    call('ZADD', B .. 'free', at, member)
  end
  call('ZADD', B .. 'leases', quick_text(ms), id)
  call('HSET', B .. 'lease', id,
    fence .. '|' .. member .. '|' .. m.generation .. '|0|' .. client .. '|' .. at .. '|1')
  quick_ttl(g.ttl)
  return {
    'GRANTED', fence, member, tonumber(m.generation), 0, lease_ms, call('ZCARD', B .. 'free'),
    quick_next(math.min(g.expiry or ms, ms), g.due, now), now,
  }
end

if quick and quick.kind == 'none' then
  local reply = quick_acquire(quick)
  if reply then return reply end
end
