-- requeue: moves a batch of the failed jobs of a reopened group into the fair queue, all of them or
-- those that reopen has stored as chosen. Those of a paused group enter it when the group is
-- resumed.
-- State: failed → waiting
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  group  -     the group's id
--   2  most   jobs  about how many jobs to move: HSCAN may return some more
-- Reply
--   {'MORE', n}  n jobs were moved; failed jobs may be left
--   {'DONE', n}  n jobs were moved, and none is left to move; or the group is not being reopened,
--                or is cancelled
-- The group's field requeue holds the cursor of the scan over its failures. A scan that began again
-- in each call would pass over the empty buckets of the jobs that have moved, again and again.
-- Only jobs that failed before this round move: a job that fails again in the meantime stays
-- failed. The record, the dead letter and the earlier errors of a moved job are deleted. So is the
-- record of a job that is not failed. A record that can't be read is quarantined.
-- Twice: the jobs that were moved are not among the failures any more.
-- Out of memory: refused.
-- Cost: some µs a job.
local group, most = ARGV[1], tonumber(ARGV[2])
local key, failures = B .. 'group:' .. group, B .. 'failures:' .. group
local g = call('HMGET', key, 'tenant', 'lane', 'requeue', 'status', 'round', 'paused', 'types', 'retry')
if not g[3] or g[4] == 'CANCELLED' then return { 'DONE', 0 } end
local now, tenant, lane, factor = now_ms(), g[1], g[2], alpha()
-- to_set returns a set of the elements of a list.
local function to_set(list)
  local set = {}
  for _, v in ipairs(list or {}) do set[v] = true end
  return set
end
local retry = g[8] and cjson.decode(g[8])
local chosen_codes, chosen_jobs = to_set(retry and retry.codes), to_set(retry and retry.jobs)
local page = call('HSCAN', failures, g[3], 'COUNT', most)
local cursor, n = page[1], #page[2]
local cut = false -- HSCAN returns a small hash as a whole: the next call scans the rest again
local queues, order, ords, codes, scanned, unreadable, letters = {}, {}, {}, {}, {}, {}, {}
for i = 1, n, 2 do
  if #scanned >= most and cursor == '0' then
    cut = true
    break
  end
  local value = page[2][i + 1]
  local err, blob = string.match(value, '^([^\n]*)\n(.*)$')
  local j = blob and parse(blob)
  local ok, e = pcall(cjson.decode, err or '')
  local readable = j and ok and type(e) == 'table' and type(e.code) == 'string'
  local stays = ok and type(e) == 'table' and e.round == tonumber(g[5]) -- it has failed in this round
  if readable and retry then stays = stays or not (chosen_codes[e.code] or chosen_jobs[j.ordinal]) end
  if not stays then scanned[#scanned + 1] = page[2][i] end
  if stays then -- its record is kept
  elseif not readable then
    unreadable[#unreadable + 1] = value
  elseif call('GETRANGE', B .. 'states:' .. group, j.ordinal * 2, j.ordinal * 2) == 'F' then
    if not queues[j.typ] then queues[j.typ], order[#order + 1] = {}, j.typ end
    local q = queues[j.typ]
    local rest = string.sub(blob, j.payload_at)
    q[#q + 1] = j.ordinal .. '|' .. string.format('%.0f', now) .. '|' .. j.trace .. '|' .. rest
    ords[#ords + 1] = j.ordinal
    codes[e.code] = (codes[e.code] or 0) + 1
    if type(e.letter) == 'string' and e.letter ~= '' then letters[#letters + 1] = e.letter end
  end
end
for _, typ in ipairs(order) do
  precheck('LLEN', B .. 'queue:' .. group .. ':' .. typ)
  precheck('HLEN', B .. 'load:' .. typ)
  precheck_enqueue(typ, lane, tenant)
end
precheck_rerank(g[7], factor)
precheck('HLEN', B .. 'codes:' .. group, B .. 'errors:' .. group)
precheck('XLEN', B .. 'dead-letters')
precheck('ZCARD', B .. 'types')
precheck('LLEN', B .. 'wake:fetcher', B .. 'quarantine')
precheck_activate(tenant)
precheck_mark_dirty()

for _, typ in ipairs(order) do
  local q = queues[typ]
  call('RPUSH', B .. 'queue:' .. group .. ':' .. typ, unpack(q))
  call('HINCRBY', B .. 'load:' .. typ, 'waiting', #q)
  if not g[6] then enqueue(typ, lane, tenant, group, #q, now, factor) end
  if not call('ZSCORE', B .. 'types', typ) then call('ZADD', B .. 'types', now, typ) end
end
for _, ordinal in ipairs(ords) do call('SETRANGE', B .. 'states:' .. group, ordinal * 2, 'W') end
for code, count in pairs(codes) do call('HINCRBY', B .. 'codes:' .. group, code, -count) end
if #letters > 0 then call('XDEL', B .. 'dead-letters', unpack(letters)) end
for _, value in ipairs(unreadable) do quarantine('failures:' .. group, value) end
local moved = #ords
if moved > 0 then
  add(key, 'failed', -moved, 'waiting', moved)
  rerank(group, g[7], factor)
  add(B .. 'tenant:' .. tenant, 'unfinished', moved)
  if not g[6] then activate(tenant, moved) end
  wake('fetcher')
end
if #scanned > 0 then
  call('HDEL', B .. 'errors:' .. group, unpack(scanned))
  call('HDEL', failures, unpack(scanned))
end
if cursor ~= '0' or cut then
  call('HSET', key, 'requeue', cursor)
  return { 'MORE', moved }
end
-- HSCAN has reached its end: it has returned all failures that were there when the scan began.
call('HDEL', key, 'requeue')
mark_dirty(group)
return { 'DONE', moved }
