-- signals: wakes idle processes, marks groups for the watcher and announces their states.
-- NEEDS  base
-- OFFERS
--   wake(role)               wakes an idle process of a role
--   announce(group, status, round, at, hash)
--                            adds an event to the outbox
--   precheck_mark_dirty()    reads the keys that mark_dirty writes
--   mark_dirty(group)        asks the watcher to look at a group

-- wake pushes a wake token for the idle processes of a role, unless there is one already.
local function wake(role)
  local key = B .. 'wake:' .. role
  precheck('LLEN', key)
  if prechecked[key] == 0 then call('LPUSH', key, '1') end
  prechecked[key] = 1
end

-- announce adds an event to the outbox: a group has entered a status. hash is the group's hash, as
-- HGETALL returns it.
local function announce(group, status, round, at, hash)
  call('XADD', B .. 'outbox', '*', 'group', group, 'status', status, 'round', round, 'at', at,
    'snapshot', cjson.encode(hash))
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
