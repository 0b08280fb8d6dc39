-- take: takes permits of a limiter, all or none. It is the only guard script without members.
--
-- KEYS
--   1  limiter  hash of the limiter's state; it also holds its guard time
-- ARGV
--   1  tokens   permits  how many to take
--   2  kind     -        sliding or token
--   3  permits  permits  permits in a window
--   4  width    ms       length of a window
--   5  burst    permits  token: permits that the bucket holds
-- Reply
--   {allowed, left, retry_after, reset_after, at}
--        allowed      1 or 0
--        left         permits that are left, at least 0
--        retry_after  µs until the same call can be allowed if no other comes; 0 when it was
--                     allowed
--        reset_after  µs until all permits are there again
--        at           guard time, µs
-- The limiter's key expires 60 s after all permits are there again.
-- Twice: spends twice. That is safe for the limit and costs permits.
-- Out of memory: refused. A call that finds too few permits (allowed is 0) is answered all the
-- same, because it writes nothing, unless the clock went back.
-- Cost: constant. With the sliding limiter about 64 entries of 28 bytes are read.
local tokens, kind, permits = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
WIDTH, BURST = tonumber(ARGV[4]), tonumber(ARGV[5])
local F = LIMIT_FIELDS[kind]
local h = call('HMGET', B, 'clk', 'offset', F[1], F[2])
local time, clk, offset = now_us(), tonumber(h[1] or 0), tonumber(h[2] or 0)
US = time + offset
local stepped = US < clk
if stepped then US = clk + 1 end
local n, next_at, state = left[kind](B, h[3], h[4], permits)
local allowed = n >= tokens
local changed = { 'clk', string.format('%.0f', US) }
if stepped then changed[3], changed[4] = 'offset', string.format('%.0f', US - time) end
if allowed then
  spend[kind](B, state, tokens, changed)
  n = n - tokens
end
if allowed or stepped then call('HSET', B, unpack(changed)) end

local full = US
if kind == 'token' then
  full = state.at
  if not allowed then next_at = state.at + tokens * state.each - BURST * state.each end
elseif state.log ~= '' then
  full = tonumber(string.sub(state.log, -28, -13)) + WIDTH * 1000
  if not allowed and tokens > 1 then
    local _, at = left[kind](B, state.log, state.n, permits - tokens + 1)
    next_at = at
  end
end
local reset = math.max(0, math.ceil(full - US))
if allowed or stepped then call('PEXPIRE', B, 60000 + math.ceil(reset / 1000)) end
local retry = allowed and 0 or math.max(1, math.ceil(next_at - US))
return { allowed and 1 or 0, math.max(0, n), retry, reset, US }
