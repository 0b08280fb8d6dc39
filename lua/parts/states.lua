-- states: the states of a group's jobs, a string in states:GROUP.
-- A state is two bytes, at twice the job's ordinal: a letter, and a mark that stands for the
-- attempt, the character 33 + attempt % 90. The letters:
--   W waiting   N non-ready   R ready   I in flight   D done, not reduced   A done and reduced
--   F failed    C cancelled
-- A run is 'first n attempt': n jobs with consecutive ordinals and the same attempt. Runs are
-- given in ascending order, joined by spaces.
-- NEEDS  base
-- OFFERS
--   mark(attempt)                              the mark of an attempt
--   SPAN                                       most jobs whose states are read in one piece
--   load_states(group, ords)                   states of jobs, and the piece that was read
--   store_states(group, ords, new, span)       writes new states
--   parse_runs(text)                           runs as a list, and the number of jobs
--   expand(runs)                               ordinals and attempts of the jobs
--   turn(group, runs, from, to, any)           a change of all the jobs' states, or nil
--   turned(group, change)                      writes what turn returned

local function mark(attempt) return string.char(33 + attempt % 90) end

-- Spans of states: one read and one write for a batch of one group's jobs, where their ordinals ascend and lie close.
local SPAN = 4096
local function load_states(group, ords)
  local key, n, got = B .. 'states:' .. group, #ords, {}
  local lo, hi, ascending = ords[1], ords[n], true
  for i = 2, n do
    if ords[i] <= ords[i - 1] then ascending = false end
  end
  if ascending and hi - lo < SPAN then
    local s = call('GETRANGE', key, lo * 2, hi * 2 + 1)
    for i = 1, n do
      local at = (ords[i] - lo) * 2
      got[i] = string.sub(s, at + 1, at + 2)
    end
    return got, s
  end
  -- A job that is named twice counts once: R with a mark that no attempt has lets nothing happen to the second.
  local named = {}
  for i = 1, n do
    got[i] = named[ords[i]] and 'R ' or call('GETRANGE', key, ords[i] * 2, ords[i] * 2 + 1)
    named[ords[i]] = true
  end
  return got, nil
end

-- store_states writes new[i] (nil: unchanged) for the jobs that load_states has read.
local function store_states(group, ords, new, span)
  local key, n = B .. 'states:' .. group, #ords
  if not span then
    for i = 1, n do
      if new[i] then call('SETRANGE', key, ords[i] * 2, new[i]) end
    end
    return
  end
  local lo, out, from = ords[1], {}, 1
  for i = 1, n do
    if new[i] then
      local at = (ords[i] - lo) * 2
      if at + 1 > from then out[#out + 1] = string.sub(span, from, at) end
      out[#out + 1] = new[i]
      from = at + 3
    end
  end
  if #out == 0 then return end
  out[#out + 1] = string.sub(span, from)
  call('SETRANGE', key, lo * 2, table.concat(out))
end

-- Runs are jobs of one group with consecutive ordinals and one attempt: 'lo n attempt', ascending, joined by spaces.
local function parse_runs(text)
  local runs, n = {}, 0
  for lo, k, attempt in string.gmatch(text, '(%d+) (%d+) (%d+)') do
    local r = { lo = tonumber(lo), n = tonumber(k), attempt = tonumber(attempt) }
    runs[#runs + 1], n = r, n + r.n
  end
  return runs, n
end
local function expand(runs)
  local ords, attempts = {}, {}
  for _, r in ipairs(runs) do
    for i = 0, r.n - 1 do ords[#ords + 1], attempts[#attempts + 1] = r.lo + i, r.attempt end
  end
  return ords, attempts
end

-- turn prepares to turn all jobs of the runs from one state into another, if each is in it under its attempt (any: under whichever); nil if not.
-- The caller writes what it returns with turned.
local function turn(group, runs, from, to, any)
  local lo, last = runs[1].lo, runs[#runs]
  local hi, at = last.lo + last.n - 1, lo
  for _, r in ipairs(runs) do
    if r.lo < at then return nil end -- a job is named twice
    at = r.lo + r.n
  end
  if hi - lo >= SPAN then return nil end
  local span, out, after = call('GETRANGE', B .. 'states:' .. group, lo * 2, hi * 2 + 1), {}, 1
  for _, r in ipairs(runs) do
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
local function turned(group, change) call('SETRANGE', B .. 'states:' .. group, change[1], change[2]) end
