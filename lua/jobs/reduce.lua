-- reduce: adds the results of jobs of one group to a partial aggregate, each job exactly once.
-- State: done → done and reduced
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group    -  the group's id
--   2  partial  -  number of the partial aggregate
--   3  version  µs  version of the partial aggregate that the caller has read, 0 = there is none
--   4  state    -  the new partial aggregate, with these results
--   5  lines    -  the result lines
--   6  ranges   -  the jobs (see parts/ranges.lua); their attempts are ignored; '' = no jobs: only
--                  the entries are removed
--   then for each entry of the stream results that held them:
--   +1  entry   -  its id
-- Reply
--   {'OK', version}            the results are added; the new version
--   {'VERSION', version}       the partial aggregate has changed: read it again
--   {'BAD', {ordinal, …}}      these jobs are not done, or are reduced: call again without them.
--                              Nothing was written
--   {'GONE'}                   there is no such group; its entries were removed
-- The version and the states' letters make sure that no result counts twice. A version is the time
-- of the write, so that it occurs once. Aggregators keep partial aggregates in memory: a counter
-- could reach a number again after a failover, or in a new group with the same id.
-- Twice: the second call answers VERSION, because the first has changed it. With the new version it
-- answers BAD. A call without jobs changes no version, and answers OK again.
-- Out of memory: goes through.
-- Cost: some µs a batch.
local group, partial, version = ARGV[1], ARGV[2], tonumber(ARGV[3])
local key, stream, aggregate = B .. 'group:' .. group, B .. 'results', B .. 'aggregate:' .. group
-- remove_entries removes the entries that held the results.
local function remove_entries()
  if #ARGV < 7 then return end
  call('XACK', stream, 'aggregator', unpack(ARGV, 7))
  call('XDEL', stream, unpack(ARGV, 7))
end
local g = call('HMGET', key, 'status')
precheck('XLEN', stream)
precheck('LLEN', B .. 'results:' .. group)
if not g[1] then
  remove_entries()
  return { 'GONE' }
end
local have = tonumber(call('HGET', aggregate, 'version:' .. partial) or 0)
if have ~= version then return { 'VERSION', have } end
local ranges, m = parse_ranges(ARGV[6])
precheck_mark_dirty()
allow_oom()
if m > 0 then
  local all = transition(group, ranges, 'D', 'A', true)
  local ords, states, span, new, bad
  if not all then
    ords, new, bad = expand(ranges), {}, {}
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
  have = math.max(version + 1, now_us())
  call('HSET', aggregate, 'partial:' .. partial, ARGV[4], 'version:' .. partial, string.format('%.0f', have))
  call('RPUSH', B .. 'results:' .. group, ARGV[5])
  if all then apply(group, all) else store_states(group, ords, new, span) end
  call('HINCRBY', key, 'reduced', m)
  local e = call('HMGET', key, 'sealed', 'done', 'reduced', 'accepted', 'failed', 'cancelled')
  local done = tonumber(e[2] or 0)
  local ended = done + tonumber(e[5] or 0) + tonumber(e[6] or 0)
  if e[1] and tonumber(e[3]) >= done and tonumber(e[4]) <= ended then mark_dirty(group) end
end
remove_entries()
return { 'OK', have }
