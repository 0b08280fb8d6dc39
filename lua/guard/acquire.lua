-- acquire: lends a member to a call, puts the call into the queue, or denies it.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  id           -   call id
--   2  client       -   client id
--   3  member       -   the member to lend; empty = any
--   4  spec         -   the guard's spec; empty for a pool, whose spec is declared
--   5  lease_ms     ms  length of the lease; 0 = as in the spec
--   6  wait         ms  how long the call may stand in the queue; 0 = not at all
--   7  bound        n   calls that may stand in the queue
--   8  valid_until  -   guard time, µs, after which this call comes too late; empty = never
-- Reply
--   {'GRANTED', fence, member, generation, probe, lease, free, next, at}
--                                       the lease: lease is its length, ms; free is the number of
--                                       members that can be lent now
--   {'QUEUED', position, next, at}      the call stands in the queue; the first position is 1
--   {'DENIED', after, reason, free, next, at}
--                                       after: ms until a member can be lent at the earliest (0 =
--                                       call again now, -1 = unknown). reason: rate_limited,
--                                       circuit_open, busy, queued or disabled
--   {'FULL', next, at}                  the queue has reached its bound
--   {'UNKNOWN', at}                     there is no such pool or member
--   {'LATE', at}                        came after valid_until
-- next is ms until the first cooling member can be lent or the first lease ends, whichever is
-- earlier (0 = call again now, -1 = neither). at is guard time, µs. With wait above 0 a call is
-- denied only if it is known that no member can be lent in that time, or if nobody waits and the
-- member that it names can't be lent now.
-- Twice: a call that has its lease gets the same fence, and its lease begins again at full length.
-- A call that stands in the queue gets its position.
-- Out of memory: refused.
-- Cost: constant for an idle guard; a call ends at most 16 leases and makes at most 16 grants.
local id, client, member, spec = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease_ms, wait, bound = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
open()
if ARGV[8] ~= '' and NOW > tonumber(ARGV[8]) then return { 'LATE', NOW } end
if spec ~= '' and spec ~= G.spec then
  precheck_guard()
  precheck('HLEN', B .. 'm:1')
  precheck('ZCARD', B .. 'members')
  G.rev, G.spec = (G.rev or 0) + 1, spec
  read_spec(spec)
  set('rev', G.rev)
  set('spec', spec)
  flush()
  call('HSETNX', B .. 'm:1', 'u', 0)
  call('ZADD', B .. 'members', G.rev, '1')
  local m = load('1')
  save(m)
  place(m)
end
if not G.spec or member ~= '' and not call('ZSCORE', B .. 'members', member) then
  if G.begun then close() end
  return { 'UNKNOWN', NOW }
end
if lease_ms == 0 then lease_ms = SPEC.lease end

maintain()
serve()

local function granted(fence, m, generation, probe)
  local free = call('ZCARD', B .. 'free')
  local ms = next_ms()
  close()
  return { 'GRANTED', fence, m, generation, probe, lease_ms, free, ms, NOW }
end

local function denied(after, reason)
  count('denied')
  local free = call('ZCARD', B .. 'free')
  local ms = next_ms()
  close()
  return { 'DENIED', after, reason, free, ms, NOW }
end

-- why returns the reason why the member m can't be lent. If its breaker is open and it is throttled
-- or has no permit, the reason is the one that lasts longer.
local function why(m)
  local where, due = standing(m)
  if where == 'off' then return 'disabled' end
  if m.breaker == 'H' and (m.concurrency == 0 or m.held < m.concurrency) then return 'circuit_open' end
  if where == 'busy' then return 'busy' end
  if m.breaker == 'O' and due and m.open_until >= due then return 'circuit_open' end
  return 'rate_limited'
end

local lease = read_lease(id)
if lease then
  claim(id, lease, lease_ms)
  return granted(lease.fence, lease.member, lease.generation, lease.probe)
end
local position = wait > 0 and not IDLE and call('ZRANK', B .. 'queue', id)
if position then
  flush()
  call('ZADD', B .. 'clients', whole(MS), client)
  touched('clients')
  local ms = next_ms()
  close()
  return { 'QUEUED', position + 1, ms, NOW }
end

local waiters = IDLE and 0 or call('ZCARD', B .. 'queue')
local m
if waiters == 0 then
  if member == '' then
    m = fit_member()
  else
    m = load(member)
    if not m then -- it was retired, and its last lease has expired now
      close()
      return { 'UNKNOWN', NOW }
    end
    if standing(m) ~= 'free' then
      local where, due = standing(m)
      local _, expiry = next_at()
      local at = where == 'cooling' and due or where == 'busy' and expiry
      return denied(at and math.max(1, math.ceil((at - NOW) / 1000)) or -1, why(m))
    end
  end
  if m then
    local fence, probe = grant(m, id, client, lease_ms, '1')
    return granted(fence, m.id, m.generation, probe)
  end
end

-- first_chance returns when (µs) a member can be lent again first, and this member: when it is due,
-- or when its lease expires. It returns nil when there is no such time, as when all members are
-- off. Leases of members that are off are skipped; if the first 16 leases are such, it returns the
-- time at which the 16th expires, alone.
local function first_chance()
  local due = call('ZRANGE', B .. 'cooling', 0, 0, 'WITHSCORES')
  local leases = call('ZRANGE', B .. 'leases', 0, 15, 'WITHSCORES')
  local at = tonumber(due[2])
  for i = 1, #leases, 2 do
    local expiry = leases[i + 1] * 1000
    if at and at <= expiry then break end
    local l = read_lease(leases[i])
    local of = l and load(l.member)
    if of and not of.off then return expiry, of end
    if i == 31 then return expiry end
  end
  if at then return at, load(due[1]) end
end

local at, of = first_chance()
local _, expiry = next_at()
local hopeless = not MORE and (not at or not expiry and at > NOW + wait * 1000)
if wait == 0 or hopeless then
  local after = at and math.max(1, math.ceil((at - NOW) / 1000)) or -1
  if MORE then after = 0 end
  if wait == 0 and waiters > 0 then return denied(after, 'queued') end
  return denied(after, of and why(of) or (MORE or at) and 'queued' or 'disabled')
end

if waiters >= bound then
  for _, other in ipairs(call('ZRANGE', B .. 'queue', 0, 63)) do
    if is_dead(other) then
      remove_waiter(other)
      waiters = waiters - 1
    end
  end
  if waiters >= bound then
    local ms = next_ms()
    close()
    return { 'FULL', ms, NOW }
  end
end
count('queued')
set('seq', G.seq + 1)
flush()
call('ZADD', B .. 'queue', G.seq + 1, id)
call('HSET', B .. 'waiters', id, client .. '|' .. whole(MS + wait))
call('ZADD', B .. 'clients', whole(MS), client)
for _, key in ipairs({ 'queue', 'waiters', 'clients' }) do touched(key) end
local ms = next_ms()
close()
return { 'QUEUED', waiters + 1, ms, NOW }
