-- blob: the codec of a job, which is one string (blob) in lists, streams and sorted sets.
--   queued = ordinal|accepted ms|trace|payload
--   moving = group|type|attempt|retries|throttles|losses|ms waited for the fair queue|
--            ms waited for the rate limit|ms waited for congestion|since ms|reason|queued
-- The key of a job is stored behind its payload, between two bytes 31, which JSON does not contain.
-- Behind it may stand further fields, each with a byte 31 at its end. A script that doesn't need
-- the payload handles all of it as one text.
-- A payload over 4 KiB is stored in payloads:GROUP and is empty in the blob. The reason says why a
-- job is non-ready: R rate limited, A throttled by the downstream API, E transient error,
-- S scheduled, P suspended when it was ready, G deferred because a resource was busy; '' = released
-- by a worker.
-- NEEDS  base
-- OFFERS
--   parse(blob)               the fields of a moving blob, or nil
--   is_congested(reason)      whether a non-ready job counts in its tenant's field congested
--   compose(j, blob)          the moving blob of such fields, with the payload of blob
--   payload_and_key(text)     the payload, and the key behind it ('' = none)
--   entry_blob(fields)        the moving blob of an entry of a ready stream
--   new_span(seed, group, ordinal, tenant, trace, ...)
--                             starts a span of a sampled job, which traced then describes
--   traced                    {group, ordinal, tenant, trace, span id, ..., …}: the new spans
--   note_step(name, group, ordinal, tenant, trace, attempt, code)
--                             says in steps that a job was ended or taken back, if it is sampled
--   steps                     {name, group, ordinal, tenant, trace, attempt, code, …}: of each such
--                             job the caller records a span of this name
--   quarantine(where, what)    stores text that is no job, or is misplaced

-- parse reads a moving blob up to its payload; nil if it can't be read. payload_at is where the
-- payload begins. retries and throttles stay text.
local function parse(blob)
  local group, typ, attempt, retries, throttles, losses, wf, wr, wc, since, reason, ordinal, accepted, trace, at =
    string.match(blob, '^([^|]*)|([^|]*)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%a?)|(%d+)|(%d+)|([^|]*)|()')
  if not group or #ordinal > 9 then return nil end -- more than states:GROUP can hold
  return {
    group = group, typ = typ, attempt = tonumber(attempt), retries = retries, throttles = throttles,
    losses = tonumber(losses), wf = tonumber(wf), wr = tonumber(wr), wc = tonumber(wc),
    since = tonumber(since), reason = reason, ordinal = tonumber(ordinal), accepted = tonumber(accepted),
    trace = trace, payload_at = at,
  }
end

-- is_congested says whether a non-ready job with this reason makes other jobs of its tenant wait
-- longer: a job that is scheduled or suspended, or waits for a resource, does not.
local function is_congested(reason) return reason ~= 'S' and reason ~= 'P' and reason ~= 'G' end

-- entry_blob returns the moving blob of an entry of a ready stream. The entry has one field: either
-- j, with the moving blob as its value, or the head of the moving blob, with the queued blob as its
-- value. In the second form a script passes a queued blob on without making a new string, because
-- Lua hashes all of each string that it makes. Any single field other than j counts as a head,
-- whatever it holds: parse and the job's state must refuse it. Of an entry with more fields
-- entry_blob returns text that parse refuses.
local function entry_blob(fields)
  if #fields ~= 2 then return (string.gsub(table.concat(fields, ' '), '|', '¦')) end -- no job
  return fields[1] == 'j' and fields[2] or fields[1] .. fields[2]
end

-- compose is the inverse of parse: it returns the moving blob of the fields j, with the payload of
-- blob, the text from which j was parsed.
local function compose(j, blob)
  return j.group .. '|' .. j.typ .. '|' .. j.attempt .. '|' .. j.retries .. '|' .. j.throttles .. '|' ..
    j.losses .. '|' .. j.wf .. '|' .. j.wr .. '|' .. j.wc .. '|' .. string.format('%.0f', j.since) .. '|' ..
    j.reason .. '|' .. j.ordinal .. '|' .. string.format('%.0f', j.accepted) .. '|' .. j.trace .. '|' ..
    string.sub(blob, j.payload_at)
end

-- payload_and_key divides the part of a blob behind the trace into the payload and the key.
local function payload_and_key(text)
  if string.byte(text, -1) ~= 31 then return text, '' end
  local payload, key = string.match(text, '^([^\31]*)\31([^\31]*)')
  return payload, key
end

-- new_span starts the next span of a sampled job: it adds the job, the id of the span and further
-- values to traced. It returns the trace with this span as its parent. The seed is 8 random hex
-- digits; the id is the seed and the number of the span in this run of the script.
local traced, spans = {}, 0
local function new_span(seed, group, ordinal, tenant, trace, ...)
  spans = spans + 1
  local id = seed .. string.format('%08x', spans)
  for _, v in ipairs({ group, ordinal, tenant, trace, id, ... }) do traced[#traced + 1] = v end
  return string.sub(trace, 1, 36) .. id .. string.sub(trace, 53)
end

-- note_step adds a sampled job to the list steps. name is fail, cancel or reclaim; code is the
-- error code of a failed job.
local steps = {}
local function note_step(name, group, ordinal, tenant, trace, attempt, code)
  if trace == '' then return end
  for _, v in ipairs({ name, group, ordinal, tenant, trace, attempt, code }) do steps[#steps + 1] = v end
end

-- quarantine adds the location where a text was found, and its first 1024 bytes, to a list of the
-- newest 1000 such texts for operators. The caller removes the text from its location.
local function quarantine(where, what)
  call('LPUSH', B .. 'quarantine', where .. ' ' .. string.sub(what, 1, 1024))
  call('LTRIM', B .. 'quarantine', 0, 999)
end
