package stream

import (
	"context"
	"fmt"
	"log/slog"
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
//	Reply: the number of entries with new ids; -1 if they are more than most: nothing was changed;
//	false if there is no stream, or its last id is not in the future.
var renumberScript = call.NewScript("renumber", luaFields+`
local stream, most = KEYS[1], tonumber(ARGV[2])
local function ms(id) return tonumber(string.match(id, '^%d+') or 0) end
if redis.call('EXISTS', stream) == 0 then return false end
local last = fields(redis.call('XINFO', 'STREAM', stream))['last-generated-id']
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local future = now + tonumber(ARGV[1])
if ms(last) < future then return false end
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
// maxRenumbered entries keep their ids: that is logged, and no error.
func renumber(ctx context.Context, c redis.Cmdable, stream string, log *slog.Logger) error {
	reply, err := renumberScript.Run(ctx, c, []string{stream}, []any{futureAge.Milliseconds(), maxRenumbered})
	if err != nil {
		return fmt.Errorf("renumber entries of stream %s: %w", stream, err)
	}
	switch n, future := reply.(int64); {
	case !future:
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
