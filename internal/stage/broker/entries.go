package broker

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

// enterTimeout bounds one call of enter. The call serves several visitors, so that it can't end
// with the request of one of them.
const enterTimeout = 5 * time.Second

// entries implements group commit for enter: visitors who come while a call runs share the next
// call, because a call for one user costs Redis more than ten times as much as a user in a large
// call. The zero value is ready.
type entries struct {
	mu     sync.Mutex
	queues map[entryKind]*entryQueue
}

// entryKind is what calls must have in common to be one call.
type entryKind struct {
	event string
	mode  waitingroom.Mode
	poll  time.Duration
}

// entryQueue holds the visitors who wait for the next call. It exists while a call runs.
type entryQueue struct{ waiting []*entryCall }

// entryCall is one visitor.
type entryCall struct {
	visitor waitingroom.Visitor
	done    chan struct{} // closed when reply or err is set
	reply   waitingroom.EnterReply
	err     error
}

// enterOne enters a visitor. It waits for the answer also when ctx ends: the caller must know
// whether the visitor of a closed stream has a place.
func (b *shared) enterOne(ctx context.Context, kind entryKind, v waitingroom.Visitor) (waitingroom.EnterReply, error) {
	c := &entryCall{visitor: v, done: make(chan struct{})}
	b.entries.mu.Lock()
	if b.entries.queues == nil {
		b.entries.queues = map[entryKind]*entryQueue{}
	}
	q := b.entries.queues[kind]
	runs := q != nil
	if !runs {
		q = &entryQueue{}
		b.entries.queues[kind] = q
	}
	q.waiting = append(q.waiting, c)
	b.entries.mu.Unlock()
	if !runs {
		go b.runEntries(context.WithoutCancel(ctx), kind, q)
	}
	<-c.done
	return c.reply, c.err
}

// runEntries calls enter until nobody waits.
func (b *shared) runEntries(ctx context.Context, kind entryKind, q *entryQueue) {
	for {
		b.entries.mu.Lock()
		n := min(len(q.waiting), waitingroom.MostUsers)
		batch := q.waiting[:n]
		q.waiting = q.waiting[n:]
		if n == 0 {
			delete(b.entries.queues, kind)
		}
		b.entries.mu.Unlock()
		if n == 0 {
			return
		}
		b.enterBatch(ctx, kind, batch)
	}
}

// enterBatch calls enter once for several visitors.
func (b *shared) enterBatch(ctx context.Context, kind entryKind, batch []*entryCall) {
	ctx, cancel := context.WithTimeout(ctx, enterTimeout)
	defer cancel()
	visitors := make([]waitingroom.Visitor, len(batch))
	for i, c := range batch {
		visitors[i] = c.visitor
	}
	reply, err := b.rooms.Enter(ctx, kind.event, kind.mode, kind.poll, visitors...)
	for i, c := range batch {
		if c.err = err; err == nil {
			c.reply = waitingroom.EnterReply{Change: reply.Change, Entries: reply.Entries[i : i+1]}
		}
		close(c.done)
	}
}
