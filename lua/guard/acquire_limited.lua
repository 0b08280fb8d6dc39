-- acquire_limited: the second step of the script acquire. If the guard has a limiter and part quick
-- can serve the call, it does so and ends the script; otherwise acquire.lua follows. acquire.lua
-- describes the arguments and the reply.

if quick and quick.kind ~= 'none' then
  local reply = quick_acquire(quick, quick_take)
  if reply then return reply end
end
