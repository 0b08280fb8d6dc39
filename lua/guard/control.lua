-- control: carries out an operator's command on a member.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  id        -  the member's id
--   2  action    -  disable, enable, open, close or take-back
--   3  argument  n  open: ms until the first probe, 0 = as in the member's rules. take-back: the
--                   lease of the guard to begin at, counted from 0
-- Reply
--   {'OK', from}     from = -1: done; otherwise call again with it as argument. take-back looks at
--                    200 leases of the guard in one call
--   {'UNKNOWN', -1}  there is no such member
--   {'REFUSED', -1}  open or close: the member has no circuit breaker. If a breaker of its earlier
--                    rules is still open, close closes it
-- disable: no new lease is granted; existing leases continue. take-back: the leases of the member
-- end as lost. Their holders learn it at their next renewal.
-- Twice: the second call changes nothing more, with two exceptions: open begins again, and
-- take-back also ends leases that were granted since the first call.
-- Out of memory: goes through.
-- Cost: some commands; take-back: some per lease.
local id, action, argument = ARGV[1], ARGV[2], tonumber(ARGV[3])
open()
if not G.spec then return { 'UNKNOWN', -1 } end
local m = load(id)
if not m then return { 'UNKNOWN', -1 } end
allow_oom()
maintain()
m = load(id)
local result, from = 'OK', -1
if not m then
  result = 'UNKNOWN' -- it was retired, and its last lease has expired now
elseif action == 'disable' and not m.off then
  m.off = 'D'
  flush()
  call('HSET', m.key, 'off', 'D')
elseif action == 'enable' and m.off == 'D' then
  m.off = nil
  flush()
  call('HDEL', m.key, 'off')
elseif action == 'open' or action == 'close' then
  if action == 'open' and argument > 0 then m.open_for = argument end
  if m.failures == 0 and (action == 'open' or m.breaker == 'C') then
    result = 'REFUSED'
  elseif action == 'open' or m.breaker ~= 'C' then
    change_breaker(m, action == 'open' and 'O' or 'C')
  end
end
if m then
  save(m)
  place(m)
end
if action == 'take-back' and m then
  local leases = call('ZRANGE', B .. 'leases', argument, argument + 199)
  from = argument
  for _, call_id in ipairs(leases) do
    local lease = read_lease(call_id)
    if lease and lease.member == id then
      count('lost')
      end_lease(call_id, lease, 'l', 0)
    else
      from = from + 1
    end
  end
  if #leases < 200 then from = -1 end
end
serve()
close()
return { result, from }
