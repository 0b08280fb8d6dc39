package stream

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// unownedConsumer is the consumer to which ClaimUnowned gives the entries that it finds. No process
// runs under this name, so other consumers claim them from it.
const unownedConsumer = "unowned"

// luaFields is Lua code: a function that makes a table by name from a reply of XINFO, which has
// each name before its value.
const luaFields = `
local function fields(pairs)
  local named = {}
  for i = 1, #pairs, 2 do named[pairs[i]] = pairs[i + 1] end
  return named
end
`

// unownedScript finds entries that were delivered and that no consumer owns: they are in the
// stream, not after the group's last delivered id, and not pending. Redis neither delivers nor
// lists them, so the script looks into the gaps between the ids of pending entries. These are
// nearly always empty, so it reads hardly any entry. It looks and claims in one step: no entry can
// be read or acknowledged in between.
//
//	KEYS: stream. ARGV: group, consumer ('' = only list the entries, and those that were claimed
//	for unownedConsumer), idle ms, the id at which to begin, pending entries and unowned entries
//	to look at (both more than 1).
//	Reply: the id at which the next call begins ('' = the end), and the unowned entries.
var unownedScript = call.NewScript("claim-unowned", luaFields+`
local stream, group, consumer, idle, from = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most, most_unowned = tonumber(ARGV[5]), tonumber(ARGV[6])
local last
if redis.call('EXISTS', stream) == 1 then
  for _, pairs in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local about = fields(pairs)
    if about.name == group then last = about['last-delivered-id'] end
  end
end
if not last then return {''} end
local unowned, start, at = {}, from == '0-0' and '-' or '(' .. from, from
local function full() return #unowned == most_unowned end
local function add(id)
  at = id
  unowned[#unowned + 1] = id
end
local function look(stop)
  if full() then return end
  for _, entry in ipairs(redis.call('XRANGE', stream, start, stop, 'COUNT', most_unowned - #unowned)) do
    add(entry[1])
  end
end
local pending = redis.call('XPENDING', stream, group, from, last, most)
for _, p in ipairs(pending) do
  look('(' .. p[1])
  if full() then break end
  start, at = '(' .. p[1], p[1]
  if consumer == '' and p[2] == '`+unownedConsumer+`' and at ~= from then add(at) end
end
if #pending < most then
  if at ~= last then look(last) end
  if not full() then at = '' end
end
if consumer ~= '' and #unowned > 0 then
  local claim = {'XCLAIM', stream, group, consumer, 0, unpack(unowned)}
  for _, option in ipairs({'IDLE', idle, 'FORCE', 'JUSTID'}) do claim[#claim + 1] = option end
  redis.call(unpack(claim))
end
return {at, unpack(unowned)}
`)

// Bounds of one call of unownedScript: pending entries and unowned entries. Fewer unowned ones,
// because the script reads them with all their fields.
const (
	pendingPage = 500
	unownedPage = 20
)

// ClaimUnowned finds the delivered entries of a stream that no consumer owns, for example after
// XGROUP DELCONSUMER, XGROUP SETID or a restored backup, and returns their ids. Otherwise they
// would stay in the stream for ever. It gives them, with the idle time idle, to a consumer without
// a process, so that consumers claim them as they claim those of a dead consumer. If the group is
// missing, there are none.
func (r *Reader) ClaimUnowned(ctx context.Context, stream string, idle time.Duration) ([]string, error) {
	return findUnowned(ctx, r.conn.Cmd, stream, r.group, unownedConsumer, idle)
}

// Unowned returns the ids of the entries that ClaimUnowned would claim for a group of the stream,
// and of those that it has claimed and that no other consumer has claimed since.
func Unowned(ctx context.Context, c redis.Cmdable, stream, group string) ([]string, error) {
	return findUnowned(ctx, c, stream, group, "", 0)
}

func findUnowned(
	ctx context.Context, c redis.Cmdable, stream, group, consumer string, idle time.Duration,
) (ids []string, err error) {
	for from := FirstID; from != ""; {
		r := unownedScript.Read(ctx, c, []string{stream},
			[]any{group, consumer, idle.Milliseconds(), from, pendingPage, unownedPage})
		from = r.Text()
		ids = append(ids, r.Texts()...)
		if err := r.Err(); err != nil {
			return ids, fmt.Errorf("find entries of stream %s that no consumer owns: %w", stream, err)
		}
	}
	return ids, nil
}
