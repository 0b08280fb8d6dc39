-- tags: the lists of a tenant's groups by their tags. tagged:TENANT:KEY=VALUE lists the groups with a
-- tag by their creation; the set tags:TENANT has the tags that have such a list. Without tags nothing
-- is read or written.
-- NEEDS  base
-- OFFERS
--   tags are those of a group's hash: KEY=VALUE on a line each; nil = it has none
--   precheck_tags(tenant, tags)     reads the keys that the others write
--   tag(tenant, group, tags, at)    puts a group on the lists of its tags
--   untag(tenant, group, tags)      takes a group off them

local function precheck_tags(tenant, tags)
  if not tags then return end
  precheck('SCARD', B .. 'tags:' .. tenant)
  for pair in string.gmatch(tags, '[^\n]+') do precheck('ZCARD', B .. 'tagged:' .. tenant .. ':' .. pair) end
end
local function tag(tenant, group, tags, at)
  for pair in string.gmatch(tags or '', '[^\n]+') do
    call('SADD', B .. 'tags:' .. tenant, pair)
    call('ZADD', B .. 'tagged:' .. tenant .. ':' .. pair, at, group)
  end
end
local function untag(tenant, group, tags)
  for pair in string.gmatch(tags or '', '[^\n]+') do
    call('ZREM', B .. 'tagged:' .. tenant .. ':' .. pair, group)
    if call('ZCARD', B .. 'tagged:' .. tenant .. ':' .. pair) == 0 then call('SREM', B .. 'tags:' .. tenant, pair) end
  end
end
