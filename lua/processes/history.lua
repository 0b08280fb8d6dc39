-- history: stores a sample of the installation's figures, one for each slot of time.
--
-- KEYS
--   1  history  the samples, newest first
-- ARGV
--   1  at      ms  Redis time at which the figures were read
--   2  slot    ms  length of a slot
--   3  most    n   most samples to keep
--   4  sample  -   the figures
-- Reply
--   {1}  it was stored
--   {0}  the slot, or a later one, has a sample
-- So a sample of a former leader, or an old sample, does no harm. Samples of the future are
-- deleted: the clock of Redis was set back.
-- Twice: the second call answers 0.
-- Out of memory: refused, unless it deletes a sample of the future.
-- Cost: constant.
local key, at, slot = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local t = redis.call('TIME')
local now, last = t[1] * 1000 + t[2] / 1000, 0
for _ = 1, 100 do
  local head = redis.call('LINDEX', key, 0)
  last = head and tonumber(string.match(head, '^%d+') or nil) or 0
  if last <= now then break end
  redis.call('LPOP', key)
end
if math.floor(last / slot) >= math.floor(at / slot) then return { 0 } end
redis.call('LPUSH', key, ARGV[1] .. ' ' .. ARGV[4])
redis.call('LTRIM', key, 0, ARGV[3] - 1)
return { 1 }
