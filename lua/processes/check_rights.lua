-- check_rights: says which commands the Redis user of the caller may not run.
--
-- KEYS
--   none
-- ARGV
--   then for each command:
--   +1  command  -  the command and its arguments, with spaces between them
-- Reply
--   {i, …}  numbers of the commands that are denied or unknown, counted from 1
-- A server that can't say it, such as miniredis or Redis before 7.0, denies nothing. The script
-- runs no command and has no key, so each node of a Cluster answers for itself.
-- Twice: the second call answers again.
-- Out of memory: goes through.
-- Cost: some µs a command.
local denied = {}
for i, command in ipairs(redis.acl_check_cmd and ARGV or {}) do
  local words = {}
  for word in string.gmatch(command, '%S+') do words[#words + 1] = word end
  local known, allowed = pcall(redis.acl_check_cmd, unpack(words))
  if not (known and allowed) then denied[#denied + 1] = i end
end
return denied
