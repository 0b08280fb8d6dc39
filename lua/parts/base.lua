-- base: keys, time, memory and checks, for the scripts of any system.
-- It needs KEYS[1], the prefix of all keys of the script. It reads no ARGV, and its functions write
-- only where it says so.
-- NEEDS  nothing
-- OFFERS
--   B                              KEYS[1]. Its braces are the hash tag, so all keys of the script
--                                  are in one slot
--   call, floor                    redis.call, math.floor
--   now_us(), now_ms()             Redis time. A script reads it once
--   precheck(command, key, ...)    reads keys that the script will write, so that a wrong type is
--                                  an error before the first write; each key once a call
--   allow_oom()                    lets the script run to its end when Redis's memory is full. It
--                                  writes nothing, but names the key 'outbox'
--   add(key, field, n, ...)        adds numbers to fields of a hash
--   guarded(f, ...)                calls f(...): a key of a wrong type is a reply, not the end

local B, call, floor = KEYS[1], redis.call, math.floor

local function now_us()
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end
local function now_ms() return floor(now_us() / 1000) end

-- precheck reads keys that the script will write, by a command for their Redis type. A key of
-- another type or in a migrating slot is then an error before the first write: Redis does not undo
-- what a script wrote before its error. A part whose function writes offers a precheck for it
-- (precheck_NAME), or the script prechecks the keys itself. A key is read once in a run of a script;
-- prechecked has the replies.
local prechecked = {}
local function precheck(command, ...)
  for i = 1, select('#', ...) do
    local key = select(i, ...)
    if not prechecked[key] then prechecked[key] = call(command, key) end
  end
end

-- allow_oom makes the script's first write one that Redis allows when its memory is full. Redis
-- then allows all later writes of the script.
local function allow_oom() call('XACK', B .. 'outbox', 'oom', '0-0') end

-- add adds to several fields of a hash: add(key, 'waiting', -3, 'ready', 3). It skips zeros.
local function add(key, ...)
  local a = { ... }
  for i = 1, #a, 2 do
    if a[i + 1] ~= 0 then call('HINCRBY', key, a[i], a[i + 1]) end
  end
end

-- guarded returns what f(...) returns, or {'ERR', text} if f has met a key of a wrong type: so that
-- one item of a batch is refused and the others go on. f may only read, because Redis does not undo
-- writes. Any other error ends the script: f is called again without pcall, because an error that
-- Lua raises again loses its code. An error is text in Redis 7.0, and a table in later versions.
local guarded
do
  local function result(f, args, ok, first, ...)
    if ok then return first, ... end
    local text = type(first) == 'table' and first.err or tostring(first)
    if not string.find(text, 'WRONGTYPE ', 1, true) then return f(unpack(args)) end
    return { 'ERR', text }
  end
  function guarded(f, ...) return result(f, { ... }, pcall(f, ...)) end
end
