-- release_quick: the first step of the script release. It serves the release of one lease that part
-- quick can serve, and ends the script. release.lua describes the arguments and the reply.

if ARGV[1] == '1' and ARGV[3] ~= '' and ARGV[4] ~= 't' then
  local id, fence, outcome = ARGV[2], ARGV[3], ARGV[4]
  local found, _, _, now, failures, most, _, ttl, first, expiry, due = quick_guard('')
  local lease = found and call('HGET', B .. 'lease', id)
  local lease_fence, member, lease_generation = string.match(lease or '', '^(%d+)|([^|]+)|(%d+)|0|')
  local held, generation, used, fails
  if lease_fence == fence then held, _, generation, used, fails = quick_member(member, now) end
  -- The breaker counts a failure, and a success sets the count to 0.
  local counts = held and failures ~= '0' and (outcome == 'f' or outcome == 's' and fails > 0)
  if held and held > 0 and generation == lease_generation and not counts then
    precheck('ZCARD', B .. 'free')
    call('ZREM', B .. 'leases', id) -- the first write: Redis allows it when its memory is full
    call('HDEL', B .. 'lease', id)
    call('HSET', B .. 'guard', 'clk', quick_text(now))
    call('HSET', B .. 'm:' .. member, 'h', held - 1)
    if most == 0 or held <= most then call('ZADD', B .. 'free', used, member) end
    quick_ttl(ttl)
    if first == id then expiry = tonumber(call('ZRANGE', B .. 'leases', 0, 0, 'WITHSCORES')[2]) end
    return { { 'OK', 'C', 0 }, quick_next(expiry, due, now), now }
  end
end
