package stream

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

const (
	ackBatch  = 200
	ackLinger = 3 * time.Millisecond // wait for more acknowledgements to share the round trip
)

// Acker collects acknowledgements and sends them in batches. It keeps an id until Redis has
// confirmed the acknowledgement.
type Acker struct {
	conn          *redisx.Conn
	stream, group string
	del           bool
	confirmed     func(ids []string)

	mu   sync.Mutex
	ids  []string
	some chan struct{} // receives a value when there is an id
	full chan struct{} // receives a value when there is a full batch

	sending sync.Mutex
}

// NewAcker returns an Acker for the entries of one stream and group. If del is set, Flush also
// deletes the entries. Flush calls confirmed with the ids that Redis has confirmed, batch by batch.
func NewAcker(conn *redisx.Conn, stream, group string, del bool, confirmed func(ids []string)) *Acker {
	return &Acker{
		conn: conn, stream: stream, group: group, del: del, confirmed: confirmed,
		some: make(chan struct{}, 1), full: make(chan struct{}, 1),
	}
}

// Add adds ids; the next Flush sends them.
func (a *Acker) Add(ids ...string) {
	if len(ids) == 0 {
		return
	}
	a.mu.Lock()
	a.ids = append(a.ids, ids...)
	n := len(a.ids)
	a.mu.Unlock()
	signal(a.some)
	if n >= ackBatch {
		signal(a.full)
	}
}

// AwaitBatch waits until there is an id, and then until a batch is full, but for 3 ms at most. It
// sends nothing. It returns false if ctx has ended.
func (a *Acker) AwaitBatch(ctx context.Context) bool {
	if len(a.first()) == 0 {
		select {
		case <-a.some:
		case <-ctx.Done():
			return false
		}
	}
	linger := time.NewTimer(ackLinger)
	defer linger.Stop()
	select {
	case <-a.full:
	case <-linger.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// Flush sends all ids that were added before, in batches; concurrent calls wait for each other.
// After an error it keeps the ids that Redis has not confirmed, for the next Flush. Sending an id
// twice changes nothing.
func (a *Acker) Flush(ctx context.Context) error {
	a.sending.Lock()
	defer a.sending.Unlock()
	for {
		ids := a.first()
		if len(ids) == 0 {
			return nil
		}
		if err := a.send(ctx, ids); err != nil {
			return err
		}
		a.mu.Lock()
		a.ids = slices.Delete(a.ids, 0, len(ids))
		a.mu.Unlock()
		a.confirmed(ids)
	}
}

func (a *Acker) first() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.ids[:min(len(a.ids), ackBatch)])
}

// send acknowledges the entries and, if del is set, deletes them, in one transaction. An entry that
// was acknowledged but not deleted would stay in the stream forever.
func (a *Acker) send(ctx context.Context, ids []string) error {
	_, err := a.conn.Cmd.TxPipelined(ctx, func(tx redis.Pipeliner) error {
		tx.XAck(ctx, a.stream, a.group, ids...)
		if a.del {
			tx.XDel(ctx, a.stream, ids...)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("acknowledge entries of stream %s: %w", a.stream, err)
	}
	return nil
}

// signal wakes the goroutine that waits on c, or the next one that will wait.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
