-- declare_room: creates an event, or changes its settings.
--
-- KEYS
--   1  base    prefix of all keys of the partition
--   2  absent  a key that never exists: Redis refuses the call while the hash slot is being moved
-- ARGV
--   1  event  -  the event's id
--   2  how    -  put: create or change, absent: only create, or change: only change
--   3  rev    n  the rev that the caller has seen, 0: any
--   then for each setting:
--   +1  name   -  a field of the event's hash
--   +2  value  -  its value, empty: none
-- Reply
--   {code, rev, over}
--        'CREATED'   the event is new
--        'CHANGED'   it has other settings now
--        'SAME'      the call changes nothing; so with absent, if the event exists
--        'CONFLICT'  its rev is not ARGV 3; this goes before SAME and CREATED
--        'UNKNOWN'   with change: there is no such event
--        rev         of the event now, 0: there is none
--        over        slots in use above the limit; 0 with CONFLICT and UNKNOWN
-- The setting stock is the number of seats to sell in all: those that were sold since the event
-- began are not left any more, whether it had a stock or not. The setting left is the number of
-- seats that are left. Nobody loses a slot. The change number of a new event begins with the time
-- (µs), so that brokers notice an event that was deleted and created again.
-- Twice: SAME. With a rev, CONFLICT, if the first call has changed it.
-- Out of memory: refused.
-- Cost: constant.
local event, how, rev = ARGV[1], ARGV[2], tonumber(ARGV[3])
local known = open_room(event)
if not known and how == 'change' then return { 'UNKNOWN', 0, 0 } end
if rev > 0 and rev ~= tonumber(R.rev or 0) then return { 'CONFLICT', tonumber(R.rev or 0), 0 } end
local function over() return math.max(0, R.used - math.min(R.capacity, R.stock or R.capacity)) end
if known and how == 'absent' then return { 'SAME', tonumber(R.rev), over() } end

local new = {} -- by name
for i = 4, #ARGV, 2 do new[ARGV[i]] = ARGV[i + 1] end
local sold = tonumber(call('HGET', ROOM, 'sold') or 0)
local left_now, seats = new['left'], new['stock']
new['left'] = nil
if left_now then
  new['stock'], new['declared_stock'] = left_now, string.format('%.0f', tonumber(left_now) + sold)
elseif seats then
  new['declared_stock'] = seats
  if seats ~= '' then new['stock'] = string.format('%.0f', math.max(0, tonumber(seats) - sold)) end
end
-- The mode follows the seats, unless the event is closed: an event without seats left is sold out;
-- a sold-out event that has seats, or no stock any more, is open.
local mode, stock = new['mode'] or R.mode or 'open', R.stock
if new['stock'] then stock = tonumber(new['stock']) end
local no_stock = not stock and R.stock and new['mode'] ~= 'sold_out'
if mode == 'sold_out' and (stock and stock > 0 or no_stock) then
  mode = 'open'
elseif mode ~= 'closed' and stock == 0 then
  mode = 'sold_out'
end
new['mode'] = mode
local set, unset = {}, {}
for name, value in pairs(new) do
  if value ~= (call('HGET', ROOM, name) or '') then
    if value == '' then
      unset[#unset + 1] = name
    else
      set[#set + 1], set[#set + 2] = name, value
    end
  end
end
if known and #set == 0 and #unset == 0 then return { 'SAME', tonumber(R.rev), over() } end

local next_rev = string.format('%.0f', math.max(tonumber(R.rev or 0) + 1, NOW))
set[#set + 1], set[#set + 2] = 'rev', next_rev
local ended = mode == 'closed' or mode == 'sold_out'
if mode ~= (R.mode or 'open') then
  set[#set + 1], set[#set + 2] = 'closed', ended and string.format('%.0f', NOW) or '0'
end
if not known then set[#set + 1], set[#set + 2] = 'change', string.format('%.0f', US) end
call('HSET', ROOM, unpack(set))
if #unset > 0 then call('HDEL', ROOM, unpack(unset)) end
open_room(event)
close_room()
local result = 'CREATED'
if known then result = 'CHANGED' end
return { result, tonumber(next_rev), over() }
