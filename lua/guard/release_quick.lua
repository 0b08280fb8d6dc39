-- release_quick: the first step of the script release. If the guard has no limiter and part quick
-- can serve the release of one lease, it does so and ends the script; otherwise release_limited
-- follows, which does the same with a limiter. release.lua describes the arguments and the reply.

local quick
if ARGV[1] == '1' and ARGV[3] ~= '' and ARGV[4] ~= 't' then quick = quick_guard('') end

-- quick_release ends the lease and returns the reply; nil where part guard is needed: then nothing
-- has been written. settle is nil or a function that settles the permit of the lease: it adds the
-- fields of the member that it changes to a list, and returns false where part guard is needed.
local function quick_release(g, settle)
  local id, outcome = ARGV[2], ARGV[4]
  local lease = call('HGET', B .. 'lease', id)
  local fence, member, generation, granted =
    string.match(lease or '', '^(%d+)|([^|]+)|(%d+)|0|[^|]*|(%d+)|')
  if fence ~= ARGV[3] then return nil end
  local m = quick_member(g, member)
  if not m or m.held == 0 or m.generation ~= generation then return nil end
  -- Part guard counts a failure for the breaker, and sets the count to 0 after a success.
  if g.failures ~= '0' and (outcome == 'f' or outcome == 's' and m.fails > 0) then return nil end
  local fields = { 'h', m.held - 1 }
  if settle and not settle(g, m.key, member, tonumber(granted), outcome, fields) then return nil end
  precheck('ZCARD', B .. 'free')
  call('ZREM', B .. 'leases', id) -- the first write: Redis allows it when its memory is full
  call('HDEL', B .. 'lease', id)
  call('HSET', B .. 'guard', 'clk', quick_text(g.now))
  call('HSET', m.key, unpack(fields))
  if g.most == 0 or m.held <= g.most then call('ZADD', B .. 'free', m.used, member) end
  quick_ttl(g.ttl)
  local expiry = g.expiry
  if g.first == id then expiry = tonumber(call('ZRANGE', B .. 'leases', 0, 0, 'WITHSCORES')[2]) end
  return { { 'OK', 'C', 0 }, quick_next(expiry, g.due, g.now), g.now }
end

if quick and quick.kind == 'none' then
  local reply = quick_release(quick)
  if reply then return reply end
end
