-- states: the states of a group's jobs, a string in states:GROUP.
-- A state is two bytes, at twice the job's ordinal: a letter, and a mark that stands for the
-- attempt, the character 33 + attempt % 90. The letters:
--   W waiting    N non-ready   R ready   I in flight   D done, not reduced   A done and reduced
--   F failed     C cancelled
-- NEEDS  base
-- OFFERS
--   mark(attempt)                           the mark of an attempt
--   SPAN                                    most consecutive ordinals that are read in one piece
--   load_states(group, ords)                states of jobs, and the piece that was read
--   store_states(group, ords, new, span)    writes new states

local function mark(attempt) return string.char(33 + attempt % 90) end

-- load_states reads the states of a batch of one group's jobs with one command, if their ordinals
-- ascend and differ by less than SPAN; otherwise with one command for each job. It returns the
-- states in the order of ords, and for store_states the piece that it read, or nil.
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
  -- If a job is named twice in a batch, the second one gets a state that fits no attempt, so that
  -- no script acts on the job twice.
  local named = {}
  for i = 1, n do
    got[i] = named[ords[i]] and 'R ' or call('GETRANGE', key, ords[i] * 2, ords[i] * 2 + 1)
    named[ords[i]] = true
  end
  return got, nil
end

-- store_states writes the states new[i] (nil: unchanged) of the jobs that load_states has read.
-- span is the piece that load_states has returned, or nil: no state in it may have changed since.
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
