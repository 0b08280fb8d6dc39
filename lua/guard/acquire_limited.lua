-- acquire_limited: the second step of the script acquire. It serves a call that part quick can
-- serve, if the guard has a limiter, and ends the script. acquire.lua describes the arguments and
-- the reply.

if quick and quick.kind ~= 'none' then
  local reply = quick_acquire(quick, quick_take)
  if reply then return reply end
end
