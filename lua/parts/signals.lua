-- signals: wakes idle processes and marks groups for the watcher.
-- NEEDS  base
-- OFFERS
--   wake(role)               wakes an idle process of a role
--   precheck_mark_dirty()    reads the keys that mark_dirty writes
--   mark_dirty(group)        asks the watcher to look at a group

-- wake pushes a token for the idle processes of a role, unless there is one.
local function wake(role)
  local key = B .. 'wake:' .. role
  if call('LLEN', key) == 0 then call('LPUSH', key, '1') end
end

-- mark_dirty adds a group to the set of those that the watcher has to look at, and wakes the
-- watcher.
local function precheck_mark_dirty()
  precheck('SCARD', B .. 'dirty')
  precheck('LLEN', B .. 'wake:watcher')
end
local function mark_dirty(group)
  call('SADD', B .. 'dirty', group)
  wake('watcher')
end
