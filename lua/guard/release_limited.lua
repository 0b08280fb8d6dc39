-- release_limited: the second step of the script release. It serves the release of one lease that
-- part quick can serve, if the guard has a limiter, and ends the script. release.lua describes the
-- arguments and the reply.

if quick and quick.kind ~= 'none' then
  local reply = quick_release(quick, quick_settle)
  if reply then return reply end
end
