// Package stream reads Redis streams in batches as a consumer of a group, and acknowledges in
// batches. It hides the creation of consumer groups, also of groups that were lost.
package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// Entry is one entry of a stream.
type Entry struct {
	ID     string
	Fields []string // name, value, name, value, … in the order in which they were written
}

// Get returns the value of the first field with this name, or "".
func (e Entry) Get(field string) string {
	for i := 0; i+1 < len(e.Fields); i += 2 {
		if e.Fields[i] == field {
			return e.Fields[i+1]
		}
	}
	return ""
}

// Size returns roughly how many bytes of memory an entry uses.
func (e Entry) Size() int {
	n := len(e.ID) + 16*len(e.Fields)
	for _, f := range e.Fields {
		n += len(f)
	}
	return n
}

// Batch holds the entries that one read returned from one stream.
type Batch struct {
	Stream  string
	Entries []Entry
}

// Reader reads streams in batches as one consumer of a group, and creates a missing group. It is
// safe for concurrent use.
type Reader struct {
	conn            *redisx.Conn
	group, consumer string
}

// NewReader returns a Reader for a group and a consumer. The consumer's name must be unique: Redis
// delivers entries to a consumer by its name.
func NewReader(conn *redisx.Conn, group, consumer string) *Reader {
	return &Reader{conn: conn, group: group, consumer: consumer}
}

// EnsureGroup creates the stream and its group, which starts at the first entry. An existing group
// is not changed.
func (r *Reader) EnsureGroup(ctx context.Context, stream string) error {
	err := r.conn.Cmd.XGroupCreateMkStream(ctx, stream, r.group, "0").Err()
	if err != nil && !call.IsBusyGroup(err) {
		return fmt.Errorf("create group %s of stream %s: %w", r.group, stream, err)
	}
	return nil
}

// Read returns up to count new entries of each stream that has any, or nil if there are none. It
// creates missing groups. The streams must have the same hash tag. Read waits for the first entry
// up to block (at most redisx.MaxBlock); with 0 it does not wait. The deadline of ctx interrupts
// the wait, a cancellation does not. After a network error Redis may have delivered entries whose
// reply was lost: only a claim of idle entries finds them.
func (r *Reader) Read(ctx context.Context, streams []string, count int, block time.Duration) ([]Batch, error) {
	return r.readOrCreate(ctx, streams, count, block, r.decoded)
}

// ReadSmall does the same as Read for entries of a few KiB, with a fraction of the CPU time. For a
// moment it has the reply in memory twice. A caller may keep strings of an entry: they keep only
// this entry in memory. A kept Fields slice keeps all entries of the stream's reply in memory.
func (r *Reader) ReadSmall(ctx context.Context, streams []string, count int, block time.Duration) ([]Batch, error) {
	return r.readOrCreate(ctx, streams, count, block, r.raw)
}

// send is a function that sends a reading command and decodes its reply: decoded for Read, raw for
// ReadSmall. In all else the two do the same.
type send func(ctx context.Context, client redis.UniversalClient, firstKey int, args []any) ([]Batch, error)

func (r *Reader) readOrCreate(
	ctx context.Context, streams []string, count int, block time.Duration, send send,
) ([]Batch, error) {
	batches, err := r.read(ctx, streams, count, block, send)
	if !call.IsNoGroup(err) {
		return batches, err
	}
	for _, stream := range streams {
		if err := r.EnsureGroup(ctx, stream); err != nil {
			return nil, err
		}
	}
	return r.read(ctx, streams, count, block, send)
}

func (r *Reader) read(
	ctx context.Context, streams []string, count int, block time.Duration, send send,
) ([]Batch, error) {
	client := r.conn.Cmd
	args := make([]any, 0, 9+2*len(streams))
	args = append(args, "xreadgroup", "group", r.group, r.consumer, "count", count)
	if block > 0 {
		client = r.conn.Block
		ms := min(block, redisx.MaxBlock).Milliseconds()
		args = append(args, "block", max(ms, 1)) // BLOCK 0 would wait forever
	}
	args = append(args, "streams")
	firstKey := len(args)
	for _, stream := range streams {
		args = append(args, stream)
	}
	for range streams {
		args = append(args, ">")
	}

	batches, err := send(ctx, client, firstKey, args)
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read streams %v: %w", streams, err)
	}
	return batches, nil
}

func (*Reader) decoded(ctx context.Context, client redis.UniversalClient, firstKey int, args []any) ([]Batch, error) {
	reply, err := do(ctx, client, firstKey, args)
	if err != nil {
		return nil, err
	}
	return decodeBatches(reply)
}

// raw is the send of ReadSmall: it collects the bytes of the reply and decodes them itself. If the
// reply is an error, Redis has delivered nothing. Then raw repeats the command through decoded, so
// that go-redis handles the error, for example a redirect of a Cluster.
func (r *Reader) raw(ctx context.Context, client redis.UniversalClient, firstKey int, args []any) ([]Batch, error) {
	reply := rawReplies.Get().(*rawReply)
	defer reply.release()
	cmd := redis.NewRawWriteToCmd(ctx, reply, args...)
	cmd.SetFirstKeyPos(int8(firstKey))
	_ = client.Process(ctx, cmd)
	if err := cmd.Err(); err != nil {
		return nil, err
	}
	if bytes.HasPrefix(reply.b, []byte("-")) {
		return r.decoded(ctx, client, firstKey, args)
	}
	return decodeRaw(reply.b)
}

// Claim gives up to count pending entries that were idle for at least minIdle to this consumer. It
// searches from the id start on. It returns the entries, the id at which the next call continues
// ("0-0" at the end), and how many pending entries no longer exist in the stream (always 0 before
// Redis 7). A missing group is an error.
func (r *Reader) Claim(
	ctx context.Context, stream string, minIdle time.Duration, start string, count int,
) (entries []Entry, next string, deleted int, err error) {
	reply, err := do(ctx, r.conn.Cmd, 1, []any{
		"xautoclaim", stream, r.group, r.consumer, minIdle.Milliseconds(), start, "count", count,
	})
	if err != nil {
		return nil, "", 0, fmt.Errorf("claim entries of stream %s: %w", stream, err)
	}
	parts, ok := reply.([]any)
	if !ok || len(parts) < 2 {
		return nil, "", 0, fmt.Errorf("claim entries of stream %s: %w", stream, errMalformed)
	}
	next, ok = parts[0].(string)
	entries, err = decodeEntries(parts[1])
	if !ok || err != nil {
		return nil, "", 0, fmt.Errorf("claim entries of stream %s: %w", stream, errMalformed)
	}
	if len(parts) > 2 {
		ids, _ := parts[2].([]any)
		deleted = len(ids)
	}
	return entries, next, deleted, nil
}

// TakeFrom gives up to count pending entries of another consumer to this one, and returns them. If
// the group is missing, there are none.
func (r *Reader) TakeFrom(ctx context.Context, stream, consumer string, count int64) ([]Entry, error) {
	pending, err := r.conn.Cmd.XPendingExt(ctx, &redis.XPendingExtArgs{
		Stream: stream, Group: r.group, Start: "-", End: "+", Count: count, Consumer: consumer,
	}).Result()
	if err != nil && !errors.Is(err, redis.Nil) && !call.IsNoGroup(err) {
		return nil, fmt.Errorf("read pending entries of stream %s: %w", stream, err)
	}
	if len(pending) == 0 {
		return nil, nil
	}
	args := []any{"xclaim", stream, r.group, r.consumer, 0}
	for _, e := range pending {
		args = append(args, e.ID)
	}
	reply, err := do(ctx, r.conn.Cmd, 1, args)
	if err != nil {
		return nil, fmt.Errorf("claim entries of stream %s: %w", stream, err)
	}
	entries, err := decodeEntries(reply)
	if err != nil {
		return nil, fmt.Errorf("claim entries of stream %s: %w", stream, err)
	}
	return entries, nil
}

// GiveTo gives pending entries to another consumer.
func (r *Reader) GiveTo(ctx context.Context, stream, consumer string, ids []string) error {
	args := []any{"xclaim", stream, r.group, consumer, 0}
	for _, id := range ids {
		args = append(args, id)
	}
	if _, err := do(ctx, r.conn.Cmd, 1, append(args, "justid")); err != nil {
		return fmt.Errorf("give entries of stream %s away: %w", stream, err)
	}
	return nil
}

// ClaimNext claims the next page of entries of dead consumers: it continues at *from, which begins
// with FirstID and is that again after the last page, or if the group is missing. With the first
// page it also recovers entries that Redis does not deliver by itself (see Recover).
func (r *Reader) ClaimNext(
	ctx context.Context, stream string, minIdle time.Duration, from *string, count int, log *slog.Logger,
) ([]Entry, error) {
	if *from == FirstID {
		if err := r.Recover(ctx, stream, minIdle, log); err != nil {
			return nil, err
		}
	}
	entries, next, deleted, err := r.Claim(ctx, stream, minIdle, *from, count)
	if call.IsNoGroup(err) {
		*from = FirstID
		return nil, nil // the next read creates the group
	}
	if err != nil {
		return nil, err
	}
	if deleted > 0 {
		log.WarnContext(ctx, "pending entries had been deleted from the stream", "stream", stream, "count", deleted)
	}
	*from = next
	return entries, nil
}

// do sends a command and returns its undecoded reply. go-redis's typed commands decode entries into
// maps, which lose the order of fields and repeated names. Decoding the reply in this package costs
// the same.
func do(ctx context.Context, client redis.UniversalClient, firstKey int, args []any) (any, error) {
	cmd := redis.NewCmd(ctx, args...)
	cmd.SetFirstKeyPos(int8(firstKey))
	_ = client.Process(ctx, cmd)
	return cmd.Result()
}

var errMalformed = errors.New("malformed reply")

func decodeBatches(reply any) ([]Batch, error) {
	streams, ok := reply.([]any)
	if !ok {
		return nil, errMalformed
	}
	batches := make([]Batch, 0, len(streams))
	for _, s := range streams {
		pair, ok := s.([]any)
		if !ok || len(pair) != 2 {
			return nil, errMalformed
		}
		name, ok := pair[0].(string)
		entries, err := decodeEntries(pair[1])
		if !ok || err != nil {
			return nil, errMalformed
		}
		batches = append(batches, Batch{Stream: name, Entries: entries})
	}
	return batches, nil
}

func decodeEntries(reply any) ([]Entry, error) {
	list, ok := reply.([]any)
	if !ok {
		return nil, errMalformed
	}
	entries := make([]Entry, 0, len(list))
	for _, item := range list {
		if item == nil {
			continue // Redis 6 returns deleted entries as nil
		}
		pair, ok := item.([]any)
		if !ok || len(pair) != 2 {
			return nil, errMalformed
		}
		id, ok := pair[0].(string)
		values, okValues := pair[1].([]any)
		if !ok || !okValues {
			return nil, errMalformed
		}
		// Each entry gets a slice of its own, so that a kept entry does not keep the others in
		// memory.
		fields := make([]string, len(values))
		for i, v := range values {
			if fields[i], ok = v.(string); !ok {
				return nil, errMalformed
			}
		}
		entries = append(entries, Entry{ID: id, Fields: fields})
	}
	return entries, nil
}
