-- change: replaces records of API keys, all of them or none.
--
-- KEYS
--   1  hash  the Redis hash of the records of API keys, by the hash of the token
-- ARGV
--   1  most  n  most records that there may be
--   then, for each record:
--   +1  field  -  the hash of the token
--   +2  old    -  its record as the caller has read it, empty: none
--   +3  new    -  its record from now on, empty: it is removed
-- Reply
--   {'DONE'}     the records are the new ones
--   {'CHANGED'}  one of them is neither the old nor the new one, so another call has changed it
--   {'FULL'}     there would be more records than most
-- Only DONE changes something.
-- Twice: answers DONE again, or CHANGED if another call has changed a record meanwhile.
-- Out of memory: refused, unless it only removes records.
-- Cost: the number of records that it changes.
local hash, most = KEYS[1], tonumber(ARGV[1])
local set, removed, added = {}, {}, 0
for i = 2, #ARGV, 3 do
  local field, old, new = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local has = redis.call('HGET', hash, field) or ''
  if has ~= old and has ~= new then return { 'CHANGED' } end
  if has ~= new then
    if new == '' then
      removed[#removed + 1], added = field, added - 1
    else
      set[#set + 1], set[#set + 2] = field, new
      if has == '' then added = added + 1 end
    end
  end
end
if added > 0 and redis.call('HLEN', hash) + added > most then return { 'FULL' } end
-- HSET comes first, so that a call is refused as a whole when memory is full
if #set > 0 then redis.call('HSET', hash, unpack(set)) end
if #removed > 0 then redis.call('HDEL', hash, unpack(removed)) end
return { 'DONE' }
