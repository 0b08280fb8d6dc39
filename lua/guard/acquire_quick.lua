-- acquire_quick: the first step of the script acquire. It serves a call that part quick can serve,
-- and ends the script. acquire.lua describes the arguments and the reply.

do
  local id, client, member, spec = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local fence, granted, time, now, _, most, lease_ms, ttl, _, expiry, due = quick_guard(spec)
  local quick = fence and (ARGV[8] == '' or now <= tonumber(ARGV[8]))
    and (ttl == 0 or tonumber(ARGV[5]) <= lease_ms) and call('HEXISTS', B .. 'lease', id) == 0
  if quick and member == '' then
    member = call('ZRANGE', B .. 'free', 0, 0)[1]
  elseif quick and not call('ZSCORE', B .. 'free', member) then
    member = nil
  end
  local held, uses, generation
  if quick and member then held, uses, generation = quick_member(member, now) end
  if held and (most == 0 or held < most) then
    if ARGV[5] ~= '0' then lease_ms = tonumber(ARGV[5]) end
    local ms = floor(now / 1000) + lease_ms
    now = now + 1
    local at = quick_text(now)
    fence = quick_text(math.max(fence + 1, time))
    call('HSET', B .. 'guard', 'clk', at, 'fence', fence, 'granted', granted + 1)
    call('HSET', B .. 'm:' .. member, 'h', held + 1, 'u', at, 'uses', uses + 1)
    if held + 1 == most then
      call('ZREM', B .. 'free', member)
    else
      call('ZADD', B .. 'free', at, member)
    end
    call('ZADD', B .. 'leases', quick_text(ms), id)
    call('HSET', B .. 'lease', id,
      fence .. '|' .. member .. '|' .. generation .. '|0|' .. client .. '|' .. at .. '|1')
    quick_ttl(ttl)
    return {
      'GRANTED', fence, member, tonumber(generation), 0, lease_ms, call('ZCARD', B .. 'free'),
      quick_next(math.min(expiry or ms, ms), due, now), now,
    }
  end
end
