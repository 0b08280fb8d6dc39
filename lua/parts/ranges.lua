-- ranges: jobs of one group that change their state together.
-- A job range is 'first n attempt': n jobs with consecutive ordinals and the same attempt. Ranges
-- come in ascending order, joined by spaces. So a script reads and writes all their states at once.
-- NEEDS  base, states
-- OFFERS
--   parse_ranges(text)                          ranges as a list, and the number of jobs
--   expand(ranges)                              ordinals and attempts of the jobs
--   transition(group, ranges, from, to, any)    a change of all the jobs' states, or nil
--   apply(group, change)                        writes what transition returned

local function parse_ranges(text)
  local ranges, n = {}, 0
  for lo, k, attempt in string.gmatch(text, '(%d+) (%d+) (%d+)') do
    local r = { lo = tonumber(lo), n = tonumber(k), attempt = tonumber(attempt) }
    ranges[#ranges + 1], n = r, n + r.n
  end
  return ranges, n
end
local function expand(ranges)
  local ords, attempts = {}, {}
  for _, r in ipairs(ranges) do
    for i = 0, r.n - 1 do ords[#ords + 1], attempts[#attempts + 1] = r.lo + i, r.attempt end
  end
  return ords, attempts
end

-- transition prepares the change of all jobs of the ranges from one state to another. It returns
-- nil unless each job is in the state `from` under its attempt (any: under any attempt), and also
-- if ranges overlap or their ordinals differ by SPAN or more. The caller writes the change with
-- apply.
local function transition(group, ranges, from, to, any)
  local lo, last = ranges[1].lo, ranges[#ranges]
  local hi, at = last.lo + last.n - 1, lo
  for _, r in ipairs(ranges) do
    if r.lo < at then return nil end -- ranges overlap
    at = r.lo + r.n
  end
  if hi - lo >= SPAN then return nil end
  local span, out, after = call('GETRANGE', B .. 'states:' .. group, lo * 2, hi * 2 + 1), {}, 1
  for _, r in ipairs(ranges) do
    local first, final = (r.lo - lo) * 2 + 1, (r.lo - lo + r.n) * 2
    local had, new = string.sub(span, first, final), nil
    if not any then
      local m = mark(r.attempt)
      if had == string.rep(from .. m, r.n) then new = string.rep(to .. m, r.n) end
    elseif #had == 2 * r.n then
      local text, n = string.gsub(had, from .. '(.)', to .. '%1')
      if n == r.n then new = text end
    end
    if not new then return nil end
    if first > after then out[#out + 1] = string.sub(span, after, first - 1) end
    out[#out + 1], after = new, final + 1
  end
  return { lo * 2, table.concat(out) }
end

-- apply writes the states that transition returned.
local function apply(group, change) call('SETRANGE', B .. 'states:' .. group, change[1], change[2]) end
