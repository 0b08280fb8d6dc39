-- repair_misplaced: quarantines a misplaced job, or an element that is no job.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  location  -  queue, non-ready, suspended, ready, results or failures
--   2  owner     -  group, tenant or type whose location it is; '' for results
--   3  typ       -  the type of a queue, '' for another location
--   4  item      -  what lies there: an element, an entry's id (ready, results) or an ordinal
--                   (failures)
--   5  twin      -  another element, or entry's id, of the same job, '' = none. item is then
--                   removed even if it fits the job's state, but only while twin is there
-- Reply
--   {1}  it was quarantined and removed
--   {0}  it belongs there, another script will remove it, its state can't be read, or it is not
--        there
-- The states decide, in the same step. The script changes no state and no count: repair and
-- repair_counter correct those of groups, types and tenants.
-- Twice: the second call does not find it.
-- Out of memory: goes through.
-- Cost: constant; in a queue, its length.
local location, owner, typ, item, twin = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
precheck('LLEN', B .. 'quarantine')

-- state_of returns the state letter and attempt mark of a job. The letter is '' if there is no such
-- job, and ? if the group has the job but its state can't be read: the script then changes nothing.
local function state_of(group, ordinal)
  if #tostring(ordinal) > 9 then return '', '' end -- no group has as many jobs
  local state = call('GETRANGE', B .. 'states:' .. group, ordinal * 2, ordinal * 2 + 1)
  local letter = string.match(state, '^[WNRIDAFC]')
  if letter then return letter, string.sub(state, 2) end
  local accepted = tonumber(call('HGET', B .. 'group:' .. group, 'accepted') or 0)
  return tonumber(ordinal) < accepted and '?' or '', ''
end
local function same(a, b)
  return a and b and a.group == b.group and a.ordinal == b.ordinal and a.attempt == b.attempt
end
local function entry(stream, id)
  local found = id ~= '' and call('XRANGE', stream, id, id) or {}
  if #found == 0 then return nil end
  local fields = {}
  for i = 1, #found[1][2], 2 do fields[found[1][2][i]] = found[1][2][i + 1] end
  fields.job = entry_blob(found[1][2])
  return fields
end
local function drop(what, from, command, ...)
  allow_oom()
  quarantine(from, what)
  call(command, ...)
  return { 1 }
end

if location == 'queue' then
  local key, ordinal = B .. 'queue:' .. owner .. ':' .. typ, string.match(item, '^(%d+)|')
  local letter = ordinal and state_of(owner, ordinal)
  if letter == '?' then return { 0 } end
  if letter == 'W' and call('HGET', B .. 'group:' .. owner, 'status') ~= 'CANCELLED' then return { 0 } end
  precheck('LLEN', key)
  allow_oom()
  if call('LREM', key, 1, item) == 0 then return { 0 } end
  quarantine('queue:' .. owner .. ':' .. typ, item)
  return { 1 }
end

if location == 'non-ready' or location == 'suspended' then
  local key = B .. location .. ':' .. owner
  if not call('ZSCORE', key, item) then return { 0 } end
  local j, other = parse(item), parse(twin)
  if j then
    local g = call('HMGET', B .. 'group:' .. j.group, 'tenant', 'sweep')
    local letter, m = state_of(j.group, j.ordinal)
    if letter == '?' or letter == 'C' and g[2] then return { 0 } end -- C: sweep will remove it
    local has_twin = same(j, other)
      and (call('ZSCORE', B .. 'non-ready:' .. owner, twin) or call('ZSCORE', B .. 'suspended:' .. owner, twin))
    if g[1] == owner and letter == 'N' and m == mark(j.attempt) and not has_twin then return { 0 } end
  end
  precheck('ZCARD', B .. 'non-ready')
  drop(item, location .. ':' .. owner, 'ZREM', key, item)
  if location == 'non-ready' then reindex(owner) end
  return { 1 }
end

if location == 'ready' then
  local stream = B .. 'ready:' .. owner
  local e, other = entry(stream, item), entry(stream, twin)
  if not e then return { 0 } end
  local j = parse(e.job)
  if j then
    local letter, m = state_of(j.group, j.ordinal)
    if letter == '?' or letter == 'C' then return { 0 } end -- C: start or reclaim will remove it
    local live = call('HEXISTS', B .. 'group:' .. j.group, 'status') == 1
    local current = (letter == 'R' or letter == 'I') and m == mark(j.attempt)
      or letter == 'I' and m == mark(j.attempt + 1)
    local has_twin = other and item ~= twin and same(j, parse(other.job))
    if live and j.typ == owner and current and not has_twin then return { 0 } end
  end
  local tenant = j and call('HGET', B .. 'group:' .. j.group, 'tenant')
  if tenant then precheck('HLEN', B .. 'tenant:' .. tenant) end
  call('XACK', stream, 'workers', item)
  drop(e.job, 'ready:' .. owner, 'XDEL', stream, item)
  if tenant then free_places(tenant, 1) end
  return { 1 }
end

if location == 'results' then
  local e = entry(B .. 'results', item)
  if not e then return { 0 } end
  for line in string.gmatch(e.l or '', '[^\n]+') do
    local ordinal = e.g and string.match(line, '^{"ordinal":(%d+)[,}]')
    local letter = ordinal and state_of(e.g, ordinal)
    if letter == 'D' or letter == '?' then return { 0 } end -- reduce leaves out the other lines
  end
  call('XACK', B .. 'results', 'aggregator', item)
  return drop((e.g or '?') .. ' ' .. (e.l or '?'), 'results', 'XDEL', B .. 'results', item)
end

local failures = B .. 'failures:' .. owner
local record = call('HGET', failures, item)
if not record then return { 0 } end
local j = parse(string.match(record, '\n(.*)$') or '')
if j and j.group == owner and tostring(j.ordinal) == item then
  local letter, m = state_of(owner, j.ordinal)
  if letter == '?' or letter == 'F' and m == mark(j.attempt) then return { 0 } end
end
return drop(record, 'failures:' .. owner, 'HDEL', failures, item)
