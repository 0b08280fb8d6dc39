-- audit: finds the violations of laws in one page of a guard, and repairs them if asked. Every
-- other script of a guard keeps the laws, so each finding is an effect of another program or of
-- lost data.
--
-- KEYS
--   1  base    prefix of all keys of the guard
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  mode  -  check, which writes nothing, or repair
--   2  list  -  members, free, cooling, leases or queue: the list to read
--   3  from  n  the first element of the page, counted from 0
--   4  n     n  how many elements, at most 200
--   5  most  n  with more leases than this, endless ones are not looked for, and the counters held
--               and probes are not checked; with more waiters than this, those that have left the
--               queue are not looked for
-- Reply
--   {more, finding, ...}  more: 1 = there may be another page. finding: {law, what, id, have, want}
--     law state: each member is in exactly one state. id: the member
--       two      it is free and cooling
--       off      it is off, and free or cooling
--       busy     all its leases or probes are out, and it is free or cooling
--       lost     it can be lent now or later, and it is neither free nor cooling
--       retired  it was removed, it has no lease, and it is still there
--       empty    the list of members names it, and it does not exist
--       ghost    the list names it, and it is no member
--     law held: the counters of a member are right. id: the member, or the call of a lease
--       held     have is its number of leases as its field says; want is the right one
--       probes   the same for the probes of the present generation
--       endless  the lease has no time at which it ends
--       bare     a time at which a lease ends, and no lease that can be read
--       orphan   the lease of a member that does not exist
--     law queue: the queue and the waiters are the same calls. id: the call
--       bare     it is in the queue, and has no record of its client and deadline
--       left     it waits, and does not stand in the queue
-- A nil reply: there is no such guard.
-- Repair: a member gets the right counters and its right place; an endless lease ends after the
-- lease length of the spec, from now on; all else is removed. Then members go to the next waiters.
-- Twice: after a repair the second call finds nothing; check finds the same again.
-- Out of memory: goes through.
-- Cost: some commands per element of the page; the list members reads all leases, at most ARGV 5.
local repairs, list = ARGV[1] == 'repair', ARGV[2]
local from, n, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
open()
precheck('HLEN', B .. 'lease', B .. 'waiters')
precheck('ZCARD', B .. 'members', B .. 'free', B .. 'cooling', B .. 'leases', B .. 'queue')
if not G.spec then return nil end
if repairs then allow_oom() else G.reads = true end
local reply = { 0 }
local function found(law, what, id, have, want)
  reply[#reply + 1] = { law, what, id, have or 0, want or 0 }
  if repairs then flush() end
  return repairs
end

-- count_leases returns the number of leases of each member, and the number of probes of each of
-- `members`. A probe of an older generation does not count. With more than ARGV 5 leases it returns
-- nil.
local function count_leases(members)
  local held, probes = {}, {}
  if call('HLEN', B .. 'lease') > most then return nil end
  for _, text in ipairs(call('HVALS', B .. 'lease')) do
    local member, generation, probe = string.match(text, '^%d+|([^|]+)|(%d+)|(%d)|')
    if member then
      held[member] = (held[member] or 0) + 1
      local m = members[member]
      if m and probe == '1' and tonumber(generation) == m.generation then
        probes[member] = (probes[member] or 0) + 1
      end
    end
  end
  return held, probes
end

local function check_member(m, held, probes)
  local free, cooling = call('ZSCORE', B .. 'free', m.id), call('ZSCORE', B .. 'cooling', m.id)
  local where, wrong, had = standing(m), false, m.held
  if free and cooling then
    wrong = found('state', 'two', m.id)
  elseif where == 'off' and (free or cooling) then
    wrong = found('state', 'off', m.id)
  elseif where == 'busy' and (free or cooling) then
    wrong = found('state', 'busy', m.id)
  elseif (where == 'free' or where == 'cooling') and not (free or cooling) then
    wrong = found('state', 'lost', m.id)
  end
  if held and m.held ~= (held[m.id] or 0) then
    wrong = found('held', 'held', m.id, m.held, held[m.id] or 0)
    m.held = held[m.id] or 0
    note(m, 'h', m.held)
  end
  if held and m.probes ~= (probes[m.id] or 0) then
    wrong = found('held', 'probes', m.id, m.probes, probes[m.id] or 0)
    m.probes = probes[m.id] or 0
    note(m, 'p', m.probes)
  end
  local retired = m.off == 'R' and m.held == 0
  if retired and had == 0 then wrong = found('state', 'retired', m.id) end
  if not wrong then return end
  if retired then
    remove_member(m.id)
  else
    save(m)
    place(m)
  end
end

local page = call('ZRANGE', B .. list, from, from + n - 1)
if #page == n then reply[1] = 1 end

if list == 'members' then
  local members = {}
  for _, id in ipairs(page) do members[id] = load(id) end
  local held, probes = count_leases(members)
  for _, id in ipairs(page) do
    if members[id] then
      check_member(members[id], held, probes)
    elseif found('state', 'empty', id) then
      remove_member(id)
    end
  end
elseif list == 'free' or list == 'cooling' then
  for _, id in ipairs(page) do
    if not call('ZSCORE', B .. 'members', id) and found('state', 'ghost', id) then
      call('ZREM', B .. list, id)
      removed(list, id)
    end
  end
elseif list == 'leases' then
  local function drop(id)
    call('ZREM', B .. 'leases', id)
    removed('leases', id)
    call('HDEL', B .. 'lease', id)
  end
  for _, id in ipairs(page) do
    local lease = read_lease(id)
    if not lease then
      if found('held', 'bare', id) then drop(id) end
    elseif call('EXISTS', B .. 'm:' .. lease.member) == 0 and found('held', 'orphan', id) then
      drop(id)
    end
  end
  local all = call('HLEN', B .. 'lease')
  if from == 0 and all <= most and all > 0 then
    for _, id in ipairs(call('HKEYS', B .. 'lease')) do
      if not call('ZSCORE', B .. 'leases', id) and found('held', 'endless', id) then
        call('ZADD', B .. 'leases', whole(MS + SPEC.lease), id)
        added('leases', id, MS + SPEC.lease)
        touched('leases')
      end
    end
  end
else
  for _, id in ipairs(page) do
    local record = call('HGET', B .. 'waiters', id)
    if not (record and string.match(record, '^[^|]*|%d+$')) and found('queue', 'bare', id) then
      remove_waiter(id)
    end
  end
  local all = call('HLEN', B .. 'waiters')
  if from == 0 and all <= most and all > 0 then
    for _, id in ipairs(call('HKEYS', B .. 'waiters')) do
      if not call('ZSCORE', B .. 'queue', id) and found('queue', 'left', id) then
        call('HDEL', B .. 'waiters', id)
      end
    end
  end
end
if repairs and #reply > 1 then
  serve()
  close()
end
return reply
