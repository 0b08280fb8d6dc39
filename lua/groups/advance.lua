-- advance: moves groups through their states as far as their counts allow.
-- State: CREATED → DISPATCHED → RUNNING → AGGREGATING → COMPLETED | FAILED
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   for each group:
--   +1  group  -  its id
-- Reply
--   one of these for each group:
--   {'OK', n, failures, round}  the group made n transitions. If failures is above 0, the group
--                               ends only after reduce_failures has stored the aggregate of its
--                               failed jobs: failures is their number, round the group's round.
--                               Of a cancelled group that is settled, they are those before its end
--   {'UNSETTLED'}               sweep or requeue must complete the group's cancellation or
--                               reopening first. It stays dirty
--   {'ERR', text}               a key of the group has a wrong Redis type
-- See parts/lifecycle.lua. A group with reply OK is not dirty any more, unless it was cancelled and
-- has such failures. The call needs no fence: a transition depends on the group's state alone.
-- Twice: the second call finds no transition to make.
-- Out of memory: goes through.
-- Cost: some 20 µs a group.
local clean = {}
precheck_move()
precheck('SCARD', B .. 'dirty')
allow_oom()
local now = now_ms()

-- read returns what load_group does, or a reply that refuses the group.
local function read(group)
  local g, hash = load_group(group)
  if g.sweep or g.requeue then return { 'UNSETTLED' } end
  if g.status then precheck_last(g.tenant) end
  return g, hash
end

local replies = {}
for i, group in ipairs(ARGV) do
  local g, hash = guarded(read, group)
  replies[i] = g
  if hash then
    local moved, failures = move(group, g, hash, {}, now)
    if g.status ~= 'CANCELLED' or failures == 0 then clean[#clean + 1] = group end
    replies[i] = { 'OK', moved, failures, tonumber(g.round or 0) }
  end
end
if #clean > 0 then call('SREM', B .. 'dirty', unpack(clean)) end
return replies
