-- signals: wakes idle processes and asks the watcher to look at a group.
-- NEEDS  base
-- OFFERS
--   wake(role)           leaves a token for the idle processes of a role
--   precheck_attend()    reads the keys that attend writes
--   attend(group)        asks the watcher to look at a group

-- wake leaves a token for the idle processes of a role.
local function wake(role)
  local key = B .. 'wake:' .. role
  if call('LLEN', key) == 0 then call('LPUSH', key, '1') end
end

-- attend asks the watcher to look at a group.
local function precheck_attend()
  precheck('SCARD', B .. 'attention')
  precheck('LLEN', B .. 'wake:watcher')
end
local function attend(group)
  call('SADD', B .. 'attention', group)
  wake('watcher')
end
