-- direct: pauses, resumes or cancels an operation, or sets one aside that can't be read. A page that
-- is stored will be done and counted all the same, because some of it may be done.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  id     -  the operation's id
--   2  do     -  pause, resume, cancel, or fail
--   3  error  -  with fail: why
-- Reply
--   {'OK'}            it is paused, runs, is cancelled or will be when its page is counted; with fail it
--                     has FAILED, unless it had ended
--   {'NOOPERATION'}   there is no such operation
--   {'OVER', state}   it has ended, or is being cancelled
-- Twice: the second call answers OK and changes nothing.
-- Out of memory: goes through.
-- Cost: constant.
local id, verb = ARGV[1], ARGV[2]
local key = operation(id)
precheck_end_operation()
allow_oom()
if verb == 'fail' then
  if call('TYPE', key).ok == 'hash' then
    call('HDEL', key, 'page', 'planned')
    local state = call('HGET', key, 'state')
    if state ~= 'COMPLETED' and state ~= 'CANCELLED' and state ~= 'FAILED' then
      call('HSET', key, 'error', ARGV[3])
      end_operation(id, 'FAILED')
    end
  end
  call('ZREM', B .. 'operations:open', id)
  return { 'OK' }
end
local o = call('HMGET', key, 'state', 'page')
local ending = o[1] == 'CANCELLING' or o[1] == 'CANCELLED'
if not o[1] then return { 'NOOPERATION' } end
if verb == 'cancel' and ending then return { 'OK' } end
if o[1] ~= 'RUNNING' and o[1] ~= 'PAUSED' then return { 'OVER', o[1] } end
if verb == 'pause' then
  call('HSET', key, 'state', 'PAUSED')
elseif verb == 'resume' then
  call('HSET', key, 'state', 'RUNNING')
elseif o[2] then
  call('HSET', key, 'state', 'CANCELLING')
else
  end_operation(id, 'CANCELLED')
end
return { 'OK' }
