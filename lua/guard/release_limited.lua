-- release_limited: the second step of the script release. If the guard has a limiter and part quick
-- can serve the release of one lease, it does so and ends the script; otherwise release.lua
-- follows. release.lua describes the arguments and the reply.

if quick and quick.kind ~= 'none' then
  local reply = quick_release(quick, quick_settle)
  if reply then return reply end
end
