-- quick_release: the first part of the script release: the release of one lease that part quick can
-- serve.
-- NEEDS  base, quick
-- OFFERS nothing: it ends the script when it has ended the lease

if ARGV[1] == '1' and ARGV[3] ~= '' and ARGV[4] ~= 't' then
  local id, fence = ARGV[2], ARGV[3]
  local found, _, _, now, most, _, ttl, first, expiry, due = quick_guard('')
  local lease = found and call('HGET', B .. 'lease', id)
  local own, member, of = string.match(lease or '', '^(%d+)|([^|]+)|(%d+)|0|')
  local held, generation, used
  if own == fence then held, _, generation, used = quick_member(member, now) end
  if held and held > 0 and generation == of then
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
