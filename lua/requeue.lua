-- requeue: a chunk of the failed jobs of a reopened group waits again.  failed → waiting
-- KEYS  base
-- ARGV  group, most jobs
-- Reply {'MORE', moved} | {'DONE', moved}
-- Twice: what was moved is not among the failures any more. Refused when memory is full. Cost: some µs a job.
local group, most = ARGV[1], tonumber(ARGV[2])
local key, failures = B .. 'group:' .. group, B .. 'failures:' .. group
local g = call('HMGET', key, 'tenant', 'lane', 'requeue')
if not g[3] then return { 'DONE', 0 } end
local now, tenant = now_ms(), g[1]
local page, moved = call('HSCAN', failures, '0', 'COUNT', most), 0
for i = 1, math.min(#page[2], most * 2), 2 do
  local ordinal, value = page[2][i], page[2][i + 1]
  local cut = string.find(value, '\n', 1, true) or 0
  local blob = string.sub(value, cut + 1)
  local j, code = parse(blob), string.match(string.sub(value, 1, cut), '"code":"([^"]+)"')
  local state = call('GETRANGE', B .. 'states:' .. group, ordinal * 2, ordinal * 2 + 1)
  if not j or not code then
    set_aside('failures:' .. group, value)
  elseif string.sub(state, 1, 1) == 'F' then
    local queued = ordinal .. '|' .. string.format('%.0f', now) .. '|' .. j.trace .. '|' .. string.sub(blob, j.payload_at)
    call('RPUSH', B .. 'queue:' .. group .. ':' .. j.typ, queued)
    call('SETRANGE', B .. 'states:' .. group, ordinal * 2, 'W')
    call('HINCRBY', B .. 'load:' .. j.typ, 'waiting', 1)
    call('HINCRBY', B .. 'codes:' .. group, code, -1)
    enqueue(j.typ, g[2], tenant, group, 1, now)
    moved = moved + 1
  end
  call('HDEL', failures, ordinal)
end
if moved > 0 then
  add(key, 'failed', -moved, 'waiting', moved)
  add(B .. 'tenant:' .. tenant, 'unfinished', moved)
  activate(tenant, moved)
  wake('fetcher')
end
if call('HLEN', failures) > 0 then return { 'MORE', moved } end
call('HDEL', key, 'requeue')
attend(group)
return { 'DONE', moved }
