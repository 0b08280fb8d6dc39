-- reduce: adds the results of jobs to partial aggregates of their groups, each job exactly once. A
-- group whose last result this is ends.
-- State: done → done and reduced; DISPATCHED | RUNNING → AGGREGATING → COMPLETED | FAILED
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   for each group:
--   +1  group    -   its id
--   +2  partial  -   number of the partial aggregate
--   +3  version  µs  version of the partial aggregate that the caller has read, 0 = there is none
--   +4  state    -   the new partial aggregate, with these results; '' = the group asks for none, and
--                    the version does not matter
--   +5  lines    -   the result lines
--   +6  ranges   -   the jobs (see parts/ranges.lua); their attempts are ignored; '' = no jobs: only
--                    the entries are removed
--   +7  entries  -   the entries of the stream results that held them, joined by spaces
-- Reply
--   one of these for each group:
--   {'OK', version}            the results are added; the new version
--   {'VERSION', version}       the partial aggregate has changed, or the group asks for one: read it
--   {'BAD', {ordinal, …}}      these jobs are not done, or are reduced: call again without them.
--                              Nothing was written
--   {'GONE'}                   there is no such group; its entries were removed
--   {'ERR', text}              a key of the group has a wrong Redis type
-- The version and the states' letters make sure that no result counts twice. A version is the time
-- of the write, so that it occurs once. Aggregators keep partial aggregates in memory: a counter
-- could reach a number again after a failover, or in a new group with the same id.
-- A group ends here only if nothing but its results was missing. Whatever sweep, requeue or
-- reduce_failures must complete is left to the watcher: the group becomes dirty. A group that has
-- ended is not dirty any more.
-- Twice: the second call answers VERSION, because the first has changed it; with the new version, or
-- without a state, it answers BAD. A call without jobs changes no version, and answers OK again.
-- Out of memory: goes through.
-- Cost: some 20 µs a group.
-- gone has the entries to remove, ended_groups the groups that have ended.
local stream, gone, ended_groups = B .. 'results', {}, {}
precheck('XLEN', stream)
precheck_move()
precheck_mark_dirty()
allow_oom()
local us = now_us()
local now = floor(us / 1000)

-- settle writes the new number of reduced results of a group, and ends the group if it can.
local function settle(group, g, hash, m)
  local reduced = tonumber(g.reduced or 0) + m
  g.reduced = string.format('%d', reduced)
  local done = tonumber(g.done or 0)
  local ended = done + tonumber(g.failed or 0) + tonumber(g.cancelled or 0)
  if not g.sealed or reduced < done or tonumber(g.accepted or 0) > ended then
    call('HSET', B .. 'group:' .. group, 'reduced', g.reduced)
    return
  end
  local _, failures = move(group, g, hash, { 'reduced', g.reduced }, now)
  if failures > 0 or g.status ~= 'COMPLETED' and g.status ~= 'FAILED' then
    mark_dirty(group)
  else
    ended_groups[#ended_groups + 1] = group
  end
end

-- read checks the results of a group. It returns the reply, and a function that stores them unless
-- they are refused. ranges is '' if there are none.
local function read(group, partial, version, state, lines, ranges)
  local aggregate = B .. 'aggregate:' .. group
  local g, hash = load_group(group)
  precheck('LLEN', B .. 'results:' .. group)
  if not g.status then return { 'GONE' } end
  if g.aggregate or state ~= '' then
    local have = tonumber(call('HGET', aggregate, 'version:' .. partial) or 0)
    if have ~= version or state == '' then return { 'VERSION', have } end
  end
  if ranges == '' then return { 'OK', version } end
  local list, m = parse_ranges(ranges)
  precheck_last(g.tenant)
  local all, new, bad = transition(group, list, 'D', 'A', true), {}, {}
  local ords, span
  if not all then
    local states
    ords = expand(list)
    states, span = load_states(group, ords)
    for i = 1, m do
      if string.sub(states[i], 1, 1) == 'D' then
        new[i] = 'A' .. string.sub(states[i], 2)
      else
        bad[#bad + 1] = ords[i]
      end
    end
    if #bad > 0 then return { 'BAD', bad } end
  end
  if state ~= '' then version = math.max(version + 1, us) end
  return { 'OK', version }, function()
    if state ~= '' then
      call('HSET', aggregate, 'partial:' .. partial, state, 'version:' .. partial, string.format('%.0f', version))
    end
    call('RPUSH', B .. 'results:' .. group, lines)
    if all then apply(group, all) else store_states(group, ords, new, span) end
    settle(group, g, hash, m)
  end
end

local replies = {}
for i = 1, #ARGV, 7 do
  local reply, store = guarded(read, ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4], ARGV[i + 5])
  if store then store() end
  if reply[1] == 'OK' or reply[1] == 'GONE' then
    for entry in string.gmatch(ARGV[i + 6], '%S+') do gone[#gone + 1] = entry end
  end
  replies[#replies + 1] = reply
end
if #ended_groups > 0 then call('SREM', B .. 'dirty', unpack(ended_groups)) end
for i = 1, #gone, 1000 do
  local to = math.min(#gone, i + 999)
  call('XACK', stream, 'aggregator', unpack(gone, i, to))
  call('XDEL', stream, unpack(gone, i, to))
end
return replies
