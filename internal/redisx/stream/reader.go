// Package stream reads streams in batches as a consumer of a group, and acknowledges in batches. It
// hides the creation of groups, also of those that were lost.
package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// Entry is one entry of a stream.
type Entry struct {
	ID     string
	Fields []string // names and values in turn, in the order they were written
}

// Get returns the value of the first field of that name, "" when there is none.
func (e Entry) Get(field string) string {
	for i := 0; i+1 < len(e.Fields); i += 2 {
		if e.Fields[i] == field {
			return e.Fields[i+1]
		}
	}
	return ""
}

// Size is what an entry weighs in memory, in bytes, roughly.
func (e Entry) Size() int {
	n := len(e.ID) + 16*len(e.Fields)
	for _, f := range e.Fields {
		n += len(f)
	}
	return n
}

// Batch is what one read found in one stream.
type Batch struct {
	Stream  string
	Entries []Entry
}

// Reader reads streams in batches as one consumer of a group, and creates the group where it is
// missing. It is safe for concurrent use.
type Reader struct {
	conn            *redisx.Conn
	group, consumer string
}

// NewReader names the group and the consumer, which must be unique to the process: entries are
// delivered to it.
func NewReader(conn *redisx.Conn, group, consumer string) *Reader {
	return &Reader{conn: conn, group: group, consumer: consumer}
}

// EnsureGroup creates the stream and its group, which begins at the first entry. One that exists
// stays as it is.
func (r *Reader) EnsureGroup(ctx context.Context, stream string) error {
	err := r.conn.Cmd.XGroupCreateMkStream(ctx, stream, r.group, "0").Err()
	if err != nil && !call.IsBusyGroup(err) {
		return fmt.Errorf("create group %s of stream %s: %w", r.group, stream, err)
	}
	return nil
}

// Read delivers up to count new entries of each stream to this consumer, nil when there are none.
// The streams must share a hash tag. It waits up to block, at most MaxBlock, for the first one; 0
// does not wait. An ended ctx does not interrupt the wait. After an error that IsAmbiguous, entries
// may be delivered without having arrived: only a claim of idle entries finds them.
func (r *Reader) Read(ctx context.Context, streams []string, count int, block time.Duration) ([]Batch, error) {
	return r.readOrCreate(ctx, streams, count, block, r.decoded)
}

// ReadSmall is Read for entries of a few KiB: it costs a fraction, and holds a reply twice for
// a moment. The Fields of what it returns share memory: their strings may be kept, the entries
// are not to be.
func (r *Reader) ReadSmall(ctx context.Context, streams []string, count int, block time.Duration) ([]Batch, error) {
	return r.readOrCreate(ctx, streams, count, block, r.raw)
}

// send is how a command is sent and its reply decoded.
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
		args = append(args, "block", max(ms, 1)) // 0 would wait forever
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

// raw takes the reply as Redis has written it. An error among that delivered nothing, so the client
// is asked in its usual way for it, which knows what it means to a connection and to a cluster.
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

// Claim takes over up to count entries that nobody has touched for minIdle, from the id start on.
// It returns where to go on, "0-0" at the end, and the ids of pending entries that are no longer
// in the stream.
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

// do sends a command whose reply is decoded here, since go-redis's maps would lose the order of
// fields and those that occur twice. It costs the same.
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
			continue // Redis 6 claims deleted entries so
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
		fields := make([]string, len(values)) // of its own, so that an entry keeps no other one in memory
		for i, v := range values {
			if fields[i], ok = v.(string); !ok {
				return nil, errMalformed
			}
		}
		entries = append(entries, Entry{ID: id, Fields: fields})
	}
	return entries, nil
}
