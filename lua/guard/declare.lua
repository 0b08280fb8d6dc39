-- declare: stores the spec and the members of a pool, in pieces of at most 200 members.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  rev   n    number of the declaration; 0 = the newest wins, and the reply says its number,
--                 which the next pieces carry
--   2  spec  -    the pool's spec
--   3  last  0|1  1: the last piece. It retires members that an older declaration named
--   4  n     n    number of members in this piece
--   then, for each member:
--   +1  id        -  the member's id
--   +2  override  -  what is different for this member; empty = nothing
-- Reply
--   {rev, result, more}  rev: number of the stored declaration. result: SAME, CHANGED or OLDER: the
--                        stored one has a higher number, or the same and another spec, and stays.
--                        more: 1 = members may remain to be retired, call again
-- A retired member is deleted; one with leases is off, and is deleted with its last lease. Limits
-- keep their state. A limit of another kind takes over the permits that are left.
-- Twice: the second call answers SAME, or CHANGED for one piece of many, or while a retired member
-- has leases.
-- Out of memory: refused.
-- Cost: some commands per member of the piece.
local rev, spec, last, n = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
open()
precheck_guard()
precheck('ZCARD', B .. 'members')
if rev > 0 and G.rev and (rev < G.rev or rev == G.rev and spec ~= G.spec) then
  return { G.rev, 'OLDER', 0 }
end

-- All members are read before the first write: a key of a wrong type is then an error without a
-- change.
local same, next_rev = spec == G.spec and not (rev > 0 and rev ~= G.rev), rev == 0
local old = {}
for i = 1, n do
  local id, override = ARGV[3 + 2 * i], ARGV[4 + 2 * i]
  old[i] = call('HMGET', B .. 'm:' .. id, 'u', 'spec', 'off')
  if not old[i][1] or (old[i][2] or '') ~= override or old[i][3] == 'R' then same = false end
end
if same and last and call('ZCARD', B .. 'members') == n then
  return { G.rev, 'SAME', 0 }
end
if next_rev then rev = (G.rev or 0) + 1 end
G.rev, G.spec = rev, spec
set('rev', rev)
set('spec', spec)
read_spec(spec)
flush()
for i = 1, n do
  local id, override = ARGV[3 + 2 * i], ARGV[4 + 2 * i]
  local key = B .. 'm:' .. id
  call('ZADD', B .. 'members', rev, id)
  if not old[i][1] then call('HSET', key, 'u', 0) end
  if (old[i][2] or '') ~= override then call('HSET', key, 'spec', override) end
  if old[i][3] == 'R' then call('HDEL', key, 'off') end
  local m = load(id)
  save(m)
  place(m)
end
local more = 0
if last then
  local retired = call('ZRANGEBYSCORE', B .. 'members', '-inf', '(' .. whole(rev), 'LIMIT', 0, 200)
  for _, id in ipairs(retired) do
    local m = load(id)
    call('ZREM', B .. 'free', id)
    call('ZREM', B .. 'cooling', id)
    removed('cooling', id)
    if m and m.held > 0 then
      call('HSET', m.key, 'off', 'R')
      save(m)
      call('ZADD', B .. 'members', rev, id)
    else
      call('DEL', B .. 'm:' .. id)
      call('ZREM', B .. 'members', id)
    end
  end
  if #retired == 200 then more = 1 end
  maintain()
  serve()
end
close()
return { rev, 'CHANGED', more }
