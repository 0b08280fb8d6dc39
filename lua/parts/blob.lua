-- blob: the codec of a job, which moves as one string (blob) through lists, streams and sorted sets.
--   queued = ordinal|accepted ms|trace|payload
--   moving = group|type|attempt|retries|throttles|losses|waited for fairness ms|for the rate ms|
--            for congestion ms|since ms|reason|queued
-- A job with a key has it behind the payload, between two bytes 31, which JSON does not contain.
-- Only what shows a payload or stores it apart divides them; to all else they are one text.
-- A payload over 4 KiB lies in payloads:GROUP and is empty in the blob. The reason says why a job
-- is non-ready: R rate limited, A throttled by the API, E transient error, S scheduled, P paused.
-- NEEDS  base
-- OFFERS
--   parse(blob)               the fields of a moving blob, or nil
--   compose(j, blob)          the moving blob of such fields, with the payload of blob
--   payload_and_key(text)     the payload, and the key behind it ('' = none)
--   entry_blob(fields)        the moving blob of an entry of a ready stream
--   mint(seed, n)             the n-th span id of a script's run
--   follow(trace, span)       the trace with span as its parent
--   quarantine(where, what)    keeps what can't be read

-- parse reads the head of a moving blob; queued starts at its last value.
local function parse(blob)
  local group, typ, attempt, retries, throttles, losses, wf, wr, wc, since, reason, ordinal, accepted, trace, at =
    string.match(blob, '^([^|]*)|([^|]*)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%a?)|(%d+)|(%d+)|([^|]*)|()')
  if not group or #ordinal > 9 then return nil end -- beyond what a string of states can hold
  return {
    group = group, typ = typ, attempt = tonumber(attempt), retries = retries, throttles = throttles,
    losses = tonumber(losses), wf = tonumber(wf), wr = tonumber(wr), wc = tonumber(wc), since = tonumber(since), reason = reason,
    ordinal = tonumber(ordinal), accepted = tonumber(accepted), trace = trace, payload_at = at,
  }
end

-- entry_blob is a ready entry's blob: its only field is j with the blob as its value, or the blob's head with the rest, from the ordinal on. So what is queued is
-- handed on as it is: Lua hashes all of each string that it makes.
local function entry_blob(fields)
  if #fields ~= 2 then return (string.gsub(table.concat(fields, ' '), '|', '¦')) end -- no job
  return fields[1] == 'j' and fields[2] or fields[1] .. fields[2]
end

-- compose is parse's inverse; the payload is taken from the blob that was parsed.
local function compose(j, blob)
  return j.group .. '|' .. j.typ .. '|' .. j.attempt .. '|' .. j.retries .. '|' .. j.throttles .. '|' .. j.losses .. '|' ..
    j.wf .. '|' .. j.wr .. '|' .. j.wc .. '|' .. string.format('%.0f', j.since) .. '|' .. j.reason .. '|' .. j.ordinal .. '|' ..
    string.format('%.0f', j.accepted) .. '|' .. j.trace .. '|' .. string.sub(blob, j.payload_at)
end

-- payload_and_key divides the text behind the trace.
local function payload_and_key(text)
  if string.byte(text, -1) ~= 31 then return text, '' end
  local payload, key = string.match(text, '^(.*)\31([^\31]+)\31$')
  return payload or text, key or ''
end

-- mint gives the n-th span id of a script's run; seed is 8 random hex digits.
local function mint(seed, n) return seed .. string.format('%08x', n) end
local function follow(trace, span) return string.sub(trace, 1, 36) .. span .. string.sub(trace, 53) end

-- quarantine keeps what can't be read as a job for an operator, in a bounded list.
local function quarantine(where, what)
  call('LPUSH', B .. 'quarantine', where .. ' ' .. string.sub(what, 1, 1024))
  call('LTRIM', B .. 'quarantine', 0, 999)
end
