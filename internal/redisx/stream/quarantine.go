package stream

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// Quarantine is a place for entries that can't be handled. An operator looks at them.
type Quarantine struct {
	Key string
	// Source says where the entries come from. With "" the quarantine is a stream of entries with
	// all their fields; otherwise it is a list of texts that begin with Source.
	Source string
}

// The limits of a quarantine: of a list, texts, and characters of an entry's fields; of a stream,
// entries, and bytes of one field.
const (
	maxListed     = 1000
	maxListedText = 1024
	maxStored     = 100_000
	maxStoredText = 256 << 10
)

// add adds the commands that store an entry in the quarantine to a pipeline. It cuts what is too
// long.
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

// AddText adds the commands that store content in a quarantine that is a list. id is the content's
// id.
func (q Quarantine) AddText(ctx context.Context, pipe redis.Pipeliner, id string, reason error, content string) {
	pipe.LPush(ctx, q.Key, fmt.Sprintf("%s %s: %v: %.*q", q.Source, id, reason, maxListedText, content))
	pipe.LTrim(ctx, q.Key, 0, maxListed-1)
}

// Quarantine moves an entry from a stream to q. It acknowledges the entry after it is stored, in a
// call of its own, because a transaction would acknowledge it even if storing failed. If it returns
// an error, the entry is still pending, and may be in q too.
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
