-- signals: wakes idle processes, marks groups for the watcher and announces their states.
-- NEEDS  base
-- OFFERS
--   wake(role)               wakes an idle process of a role
--   precheck_announce()      reads the keys that announce writes
--   announce(group, round, moves, hash)
--                            adds events to the outbox
--   precheck_mark_dirty()    reads the keys that mark_dirty writes
--   mark_dirty(group)        asks the watcher to look at a group

-- wake pushes a wake token for the idle processes of a role, unless there is one already.
local function wake(role)
  local key = B .. 'wake:' .. role
  precheck('LLEN', key)
  if prechecked[key] == 0 then call('LPUSH', key, '1') end
  prechecked[key] = 1
end

-- announce adds an entry to the outbox: a group has entered one status or several. moves has them in
-- turn with their times, {status, at, …}; hash is the group's hash after the last one, as HGETALL
-- returns it.
local function precheck_announce()
  precheck('XLEN', B .. 'outbox')
  precheck('LLEN', B .. 'wake:watcher')
end
local function announce(group, round, moves, hash)
  local entry = { 'group', group, 'round', round, 'snapshot', cjson.encode(hash) }
  if #moves == 2 then
    entry[7], entry[8], entry[9], entry[10] = 'status', moves[1], 'at', moves[2]
  else
    entry[7], entry[8] = 'moves', table.concat(moves, ' ')
  end
  call('XADD', B .. 'outbox', '*', unpack(entry))
  wake('watcher')
end

-- mark_dirty adds a group to the dirty groups, which the watcher has to look at, and wakes the
-- watcher.
local function precheck_mark_dirty()
  precheck('SCARD', B .. 'dirty')
  precheck('LLEN', B .. 'wake:watcher')
end
local function mark_dirty(group)
  call('SADD', B .. 'dirty', group)
  wake('watcher')
end
