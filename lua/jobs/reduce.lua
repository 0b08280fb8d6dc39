-- reduce: merges results of one group into its aggregate, each job exactly once.  done → reduced
-- KEYS  base
-- ARGV  group, slot, version of the slot that was read, its new state, lines of results, ranges of the jobs (their attempts don't matter), then the entries
-- Reply {'OK', new version} | {'VERSION', version} the slot has moved on: read it again | {'BAD', ordinals that are not to be reduced} nothing was
--       written: leave them out and call again | {'GONE'} the group is no more; its entries are taken away
-- The slot's version and the states' letters are the fence. Twice: the ordinals are reduced already, so the second call answers BAD.
-- Goes through when memory is full. Cost: some µs a batch.
local group, slot, version = ARGV[1], ARGV[2], tonumber(ARGV[3])
local key, stream, aggregate = B .. 'group:' .. group, B .. 'results', B .. 'aggregate:' .. group
local function settle()
  if #ARGV < 7 then return end
  call('XACK', stream, 'aggregator', unpack(ARGV, 7))
  call('XDEL', stream, unpack(ARGV, 7))
end
local g = call('HMGET', key, 'status')
precheck('XLEN', stream)
precheck('LLEN', B .. 'results:' .. group)
if not g[1] then
  settle()
  return { 'GONE' }
end
local have = tonumber(call('HGET', aggregate, 'version:' .. slot) or 0)
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
      if string.sub(states[i], 1, 1) == 'D' then new[i] = 'A' .. string.sub(states[i], 2) else bad[#bad + 1] = ords[i] end
    end
    if #bad > 0 then return { 'BAD', bad } end
  end
  have = version + 1
  call('HSET', aggregate, 'slot:' .. slot, ARGV[4], 'version:' .. slot, have)
  call('RPUSH', B .. 'results:' .. group, ARGV[5])
  if all then apply(group, all) else store_states(group, ords, new, span) end
  call('HINCRBY', key, 'reduced', m)
  local e = call('HMGET', key, 'sealed', 'done', 'reduced', 'accepted', 'failed', 'cancelled')
  if e[1] and tonumber(e[3]) >= tonumber(e[2] or 0) and tonumber(e[4]) <= tonumber(e[2] or 0) + tonumber(e[5] or 0) + tonumber(e[6] or 0) then mark_dirty(group) end
end
settle()
return { 'OK', have }
