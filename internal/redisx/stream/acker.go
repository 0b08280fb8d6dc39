package stream

import (
	"context"
	"slices"
	"sync"
	"time"
)

const (
	ackBatch  = 200
	ackLinger = 3 * time.Millisecond // wait for more acknowledgements to share the round trip
)

// acker collects the ids of handled entries, and acknowledges and deletes the entries in batches.
// It keeps an id until Redis has confirmed that.
type acker struct {
	reader    *Reader
	stream    string
	confirmed func(ids []string) // called with the ids that Redis has confirmed, batch by batch

	mu   sync.Mutex
	ids  []string
	some chan struct{} // receives a value when there is an id
	full chan struct{} // receives a value when there is a full batch

	sending sync.Mutex
}

// add adds ids; the next flush sends them.
func (a *acker) add(ids []string) {
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

// awaitBatch waits until flush should be called: first until there is an id, and then up to 3 ms
// for a full batch. It also returns when ctx ends.
func (a *acker) awaitBatch(ctx context.Context) {
	if len(a.first()) == 0 {
		select {
		case <-a.some:
		case <-ctx.Done():
			return
		}
	}
	linger := time.NewTimer(ackLinger)
	defer linger.Stop()
	select {
	case <-a.full:
	case <-linger.C:
	case <-ctx.Done():
	}
}

// flush sends all ids that were added before, in batches; concurrent calls wait for each other.
// After an error it keeps the ids that Redis has not confirmed, for the next flush. Sending an id
// twice changes nothing.
func (a *acker) flush(ctx context.Context) error {
	a.sending.Lock()
	defer a.sending.Unlock()
	for {
		ids := a.first()
		if len(ids) == 0 {
			return nil
		}
		if err := a.reader.ack(ctx, a.stream, ids...); err != nil {
			return err
		}
		a.mu.Lock()
		a.ids = slices.Delete(a.ids, 0, len(ids))
		a.mu.Unlock()
		a.confirmed(ids)
	}
}

func (a *acker) first() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.ids[:min(len(a.ids), ackBatch)])
}

// signal wakes the goroutine that receives from c, which has a buffer of one. If no goroutine waits
// now, the next receive returns at once.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
