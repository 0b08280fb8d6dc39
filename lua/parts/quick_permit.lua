-- quick_permit: takes and settles the permit of a call that part quick can serve. It serves only
-- calls after which the member has permits left: part guard must move a member without permits to
-- cooling. It writes nothing: the caller writes the fields that it adds to a list.
-- NEEDS  base, limiters
-- OFFERS
--   quick_take(g, key, now, fields)
--                             takes a permit of the member in key for a grant at guard time now
--   quick_settle(g, key, member, granted, outcome, fields)
--                             settles the permit of a lease that ends, as settle_permit in part
--                             guard; granted is the guard time of its grant
-- Both return false where part guard is needed. g is the table that quick_guard in part quick
-- returns.

-- permits_left returns the permits that a member has left, the state of its limiter, and the time
-- before which spent permits can't be moved.
local function permits_left(g, key)
  WIDTH, BURST, US = tonumber(g.window), tonumber(g.burst), g.now
  local names = LIMIT_FIELDS[g.kind]
  local h = call('HMGET', key, names[1], names[2], 'ls')
  local n, _, state = left[g.kind](key, h[1], h[2], tonumber(g.permits))
  return n, state, tonumber(h[3] or 0)
end

local function quick_take(g, key, now, fields)
  local n, state = permits_left(g, key)
  if n < 2 then return false end
  US = now
  if g.kind == 'token' then state.at = math.max(state.at, now) end
  spend[g.kind](key, state, 1, fields)
  return true
end

local function quick_settle(g, key, member, granted, outcome, fields)
  if outcome == 'u' then return false end
  -- A release to a member that is in cooling is for part guard: token rounds, so the member may
  -- have a permit some µs before the time at which it leaves cooling.
  if g.due and call('ZSCORE', B .. 'cooling', member) then return false end
  local n, state, since = permits_left(g, key)
  if granted < since then return false end
  if g.kind == 'sliding' then
    move(key, state, granted, fields)
    n = g.permits - state.n
  end
  return n >= 1
end
