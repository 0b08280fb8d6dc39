-- release_quick: the first step of the script release. It serves the release of one lease that part
-- quick can serve, and ends the script. release.lua describes the arguments and the reply.

if ARGV[1] == '1' and ARGV[3] ~= '' and ARGV[4] ~= 't' then
  local id, fence, outcome = ARGV[2], ARGV[3], ARGV[4]
  local found, _, _, now, failures, most, _, ttl, first, expiry, due = quick_guard('')
  local lease = found and call('HGET', B .. 'lease', id)
  local own, member, of = string.match(lease or '', '^(%d+)|([^|]+)|(%d+)|0|')
  local held, generation, used, fails
  if own == fence then held, _, generation, used, fails = quick_member(member, now) end
  -- The breaker counts failures, and a success ends their row.
  local counts = held and failures ~= '0' and (outcome == 'f' or outcome == 's' and fails > 0)
  if held and held > 0 and generation == of and not counts then
    if held == most then precheck('ZCARD', B .. 'free') end
    call('ZREM', B .. 'leases', id) -- the first write: Redis allows it when its memory is full
    call('HDEL', B .. 'lease', id)
    call('HSET', B .. 'guard', 'clk', quick_text(now))
    call('HSET', B .. 'm:' .. member, 'h', held - 1)
    if held == most then call('ZADD', B .. 'free', used, member) end
    quick_ttl(ttl)
    if first == id then expiry = tonumber(call('ZRANGE', B .. 'leases', 0, 0, 'WITHSCORES')[2]) end
    return { { 'OK', 'C', 0 }, quick_next(expiry, due, now), now }
  end
end
