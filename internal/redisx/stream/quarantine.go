package stream

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// Quarantine names the Redis key where entries that can't be handled are stored apart, so that an
// operator can look at them.
type Quarantine struct {
	Key string
	// Source says where the entries come from. With Source "", Key is a stream of complete entries;
	// otherwise it is a list of texts that begin with Source.
	Source string
}

// Bounds of a quarantine. A list has at most maxListed texts, each with at most maxListedText
// characters of an entry. A stream has at most about maxStored entries, each value of a field cut
// to maxStoredText bytes.
const (
	maxListed     = 1000
	maxListedText = 1024
	maxStored     = 100_000
	maxStoredText = 256 << 10
)

// add adds to a pipeline the commands that store an entry in the quarantine. It cuts what is longer
// than the bounds.
func (q Quarantine) add(ctx context.Context, pipe redis.Pipeliner, e Entry, reason error) {
	if q.Source != "" {
		q.AddText(ctx, pipe, e.ID, reason, fmt.Sprint(e.Fields))
		return
	}
	values := []any{"reason", reason.Error(), "entry", e.ID, "at", time.Now().UTC().Format(time.RFC3339Nano)}
	for i := 0; i+1 < len(e.Fields); i += 2 {
		v := e.Fields[i+1]
		if len(v) > maxStoredText {
			v = v[:maxStoredText] + fmt.Sprintf("… (%d more bytes)", len(v)-maxStoredText)
		}
		values = append(values, e.Fields[i], v)
	}
	pipe.XAdd(ctx, &redis.XAddArgs{Stream: q.Key, MaxLen: maxStored, Approx: true, Values: values})
}

// AddText adds to a pipeline the commands that store content, with its id and the reason, in a
// quarantine that is a list.
func (q Quarantine) AddText(ctx context.Context, pipe redis.Pipeliner, id string, reason error, content string) {
	pipe.LPush(ctx, q.Key, fmt.Sprintf("%s %s: %v: %.*q", q.Source, id, reason, maxListedText, content))
	pipe.LTrim(ctx, q.Key, 0, maxListed-1)
}

// Quarantine stores an entry of a stream in q, and then acknowledges and deletes it in the stream.
// These are separate calls, because a transaction would acknowledge the entry even if storing
// failed. After an error the entry is still pending, or in q, or both.
func (r *Reader) Quarantine(ctx context.Context, stream string, q Quarantine, e Entry, reason error) error {
	if err := r.store(ctx, q, e, reason); err != nil {
		return err
	}
	return r.ack(ctx, stream, e.ID)
}

func (r *Reader) store(ctx context.Context, q Quarantine, e Entry, reason error) error {
	_, err := r.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		q.add(ctx, pipe, e, reason)
		return nil
	})
	if err != nil {
		return fmt.Errorf("quarantine entry %s: %w", e.ID, err)
	}
	return nil
}

// ack acknowledges entries and deletes them, in one transaction. An entry that was acknowledged but
// not deleted would stay in the stream forever.
func (r *Reader) ack(ctx context.Context, stream string, ids ...string) error {
	_, err := r.conn.Cmd.TxPipelined(ctx, func(tx redis.Pipeliner) error {
		tx.XAck(ctx, stream, r.group, ids...)
		tx.XDel(ctx, stream, ids...)
		return nil
	})
	if err != nil {
		return fmt.Errorf("acknowledge entries of stream %s: %w", stream, err)
	}
	return nil
}
