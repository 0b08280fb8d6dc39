package stream

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// futureAge: an id that is further in the future than this was chosen by a program, because no
// Redis has a clock that is so wrong.
const futureAge = 24 * time.Hour

// maxRenumbered is the largest number of ids in the future that one call replaces. If there are
// more, the call changes nothing.
const maxRenumbered = 10_000

// renumberScript replaces ids that are in the future by new ids, which are larger than all others
// in the stream. A program that writes into a stream may choose an entry's id, and Redis gives each
// later entry a larger one. After an entry with the largest possible id, Redis refuses all further
// entries, even if that entry is deleted. The script sets the last id of the stream, and of the
// groups that have come so far, to the present. An entry that is pending is delivered again under
// its new id.
//
//	KEYS: stream. ARGV: how far in the future (ms), most entries.
//	Reply: the number of entries with new ids; -1 if they are more than most, -2 if the server is
//	Redis from 7.2 on or Valkey, whose XSETID refuses an id below that of a deleted entry: nothing
//	was changed; false if there is no stream, or its last id is not in the future.
var renumberScript = call.NewScript("renumber", luaFields+`
local stream, most = KEYS[1], tonumber(ARGV[2])
local function ms(id) return tonumber(string.match(id, '^%d+') or 0) end
if redis.call('EXISTS', stream) == 0 then return false end
local last = fields(redis.call('XINFO', 'STREAM', stream))['last-generated-id']
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local future = now + tonumber(ARGV[1])
if ms(last) < future then return false end
if (redis.REDIS_VERSION_NUM or 0) >= 0x00070200 then return -2 end
local entries = redis.call('XRANGE', stream, string.format('%.0f', future), '+', 'COUNT', most + 1)
if #entries > most then return -1 end
redis.call('XSETID', stream, last) -- changes nothing; an error here loses no entry
for _, e in ipairs(entries) do redis.call('XDEL', stream, e[1]) end
local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
last = string.format('%.0f-18446744073709551615', now)
if newest and ms(newest[1]) > now then last = newest[1] end
redis.call('XSETID', stream, last)
for _, pairs in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local group = fields(pairs)
  for _, e in ipairs(entries) do redis.call('XACK', stream, group.name, e[1]) end
  if ms(group['last-delivered-id']) >= future then redis.call('XGROUP', 'SETID', stream, group.name, last) end
end
for _, e in ipairs(entries) do redis.call('XADD', stream, '*', unpack(e[2])) end
return #entries
`)

// renumber gives new ids to the entries of a stream whose ids are in the future, and logs it.
// Otherwise an entry with the largest possible id would block the stream for ever. More than
// maxRenumbered entries, and all on a server that can't lower a stream's last id, keep their ids: that is
// logged, and no error.
func renumber(ctx context.Context, c redis.Cmdable, stream string, log *slog.Logger) error {
	reply, err := renumberScript.Run(ctx, c, []string{stream}, []any{futureAge.Milliseconds(), maxRenumbered})
	if err != nil {
		return fmt.Errorf("renumber entries of stream %s: %w", stream, err)
	}
	switch n, future := reply.(int64); {
	case !future:
	case n == -2:
		log.ErrorContext(ctx, "the last id of a stream is in the future, which this server can't undo: stop who writes "+
			"such ids, and if it refuses entries, delete the stream when it is empty", "stream", stream)
	case n < 0:
		log.ErrorContext(ctx, "too many entries have ids in the future, trying again when some are handled",
			"stream", stream)
	default:
		log.WarnContext(ctx, "the last id of a stream was in the future, its entries have new ids",
			"stream", stream, "entries", n)
	}
	return nil
}

// InFuture says whether text is an id that is in the future (see ID.InFuture).
func InFuture(text string) bool {
	id, err := ParseID(text)
	return err == nil && id.InFuture()
}

// withoutFuture renumbers the stream if the last of these entries has an id in the future. It
// returns the entries without those that got new ids: Redis delivers them again under the new ids,
// and they must be handled only once.
func (r *Reader) withoutFuture(
	ctx context.Context, stream string, entries []Entry, log *slog.Logger,
) (kept []Entry, err error) {
	if len(entries) == 0 || !InFuture(entries[len(entries)-1].ID) {
		return entries, nil
	}
	if err := renumber(ctx, r.conn.Cmd, stream, log); err != nil {
		return nil, err
	}
	for _, e := range entries {
		if InFuture(e.ID) {
			found, err := r.conn.Cmd.XRange(ctx, stream, e.ID, e.ID).Result()
			if err != nil {
				return nil, fmt.Errorf("read entry of stream %s: %w", stream, err)
			}
			if len(found) == 0 {
				continue
			}
		}
		kept = append(kept, e)
	}
	return kept, nil
}

// Recover makes the entries readable that Redis does not deliver by itself: it gives new ids to
// entries with ids in the future, and gives entries that no consumer owns to the consumer
// "unowned", from which consumers then claim them (see ClaimUnowned). It logs both.
func (r *Reader) Recover(ctx context.Context, stream string, idle time.Duration, log *slog.Logger) error {
	if err := renumber(ctx, r.conn.Cmd, stream, log); err != nil {
		return err
	}
	ids, err := r.ClaimUnowned(ctx, stream, idle)
	if err != nil {
		return err
	}
	if len(ids) > 0 {
		log.WarnContext(ctx, "no consumer owned entries of a stream that had been delivered",
			"stream", stream, "entries", len(ids), "first", ids[0])
	}
	return nil
}

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

// renewScript sets the idle time of entries that this consumer still owns. XCLAIM alone would steal
// back the entries that another consumer has claimed meanwhile.
//
// KEYS: stream. ARGV: group, consumer, idle ms, ids (at most 200). Reply: the ids that another
// consumer owns.
var renewScript = call.NewScript("renew-pending", `
local stream, group, consumer, idle = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local claim, lost = {'XCLAIM', stream, group, consumer, 0}, {}
for i = 4, #ARGV do
  local entry = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
  if entry and entry[2] == consumer then
    claim[#claim + 1] = ARGV[i]
  elseif entry then
    lost[#lost + 1] = ARGV[i]
  end
end
if #claim > 5 then
  claim[#claim + 1], claim[#claim + 2], claim[#claim + 3] = 'IDLE', idle, 'JUSTID'
  redis.call(unpack(claim))
end
return lost
`)

// forgetScript deletes consumers that have no pending entries and were idle for longer than a given
// time. Redis drops the pending entries of a deleted consumer, and then nobody could claim them. So
// the script checks and deletes in one step.
//
// KEYS: stream. ARGV: group, idle ms. Reply: the number of deleted consumers.
var forgetScript = call.NewScript("forget-dead-consumers", `
local stream, group, idle = KEYS[1], ARGV[1], tonumber(ARGV[2])
if redis.call('EXISTS', stream) == 0 then return 0 end
local dead = {}
for _, pairs in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local consumer = {}
  for i = 1, #pairs, 2 do consumer[pairs[i]] = pairs[i + 1] end
  if consumer.pending == 0 and consumer.idle > idle then dead[#dead + 1] = consumer.name end
end
for _, name in ipairs(dead) do redis.call('XGROUP', 'DELCONSUMER', stream, group, name) end
return #dead
`)

const renewBatch = 200

// Renew sets the idle time of those of the entries ids that this consumer still owns to idle: 0
// keeps them, a full lease gives them up. It returns the ids that another consumer owns now. It
// ignores ids that are not pending any more, and a missing group.
func (r *Reader) Renew(
	ctx context.Context, stream string, ids []string, idle time.Duration,
) (lost []string, err error) {
	for batch := range slices.Chunk(ids, renewBatch) {
		args := make([]any, 0, 3+len(batch))
		args = append(args, r.group, r.consumer, idle.Milliseconds())
		for _, id := range batch {
			args = append(args, id)
		}
		reply := renewScript.Read(ctx, r.conn.Cmd, []string{stream}, args)
		taken := reply.Texts()
		if err := reply.Err(); call.IsNoGroup(err) {
			return nil, nil // the next read creates the group again
		} else if err != nil {
			return lost, fmt.Errorf("renew entries of stream %s: %w", stream, err)
		}
		lost = append(lost, taken...)
	}
	return lost, nil
}

// ForgetDead deletes the group's consumers that have no pending entries and were idle for longer
// than age. It returns their number; 0 if the group is missing.
func (r *Reader) ForgetDead(ctx context.Context, stream string, age time.Duration) (int64, error) {
	reply := forgetScript.Read(ctx, r.conn.Cmd, []string{stream}, []any{r.group, age.Milliseconds()})
	n, err := call.Done(reply, reply.Number())
	if err != nil && !call.IsNoGroup(err) {
		return 0, fmt.Errorf("forget dead consumers of stream %s: %w", stream, err)
	}
	return n, nil
}
