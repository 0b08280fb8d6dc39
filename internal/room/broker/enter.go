package broker

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// enterTimeout bounds one call of the script enter. The call serves several visitors, so it must
// not end with the request of one visitor.
const enterTimeout = 5 * time.Second

// enterBatches implements group commit for enter: visitors who come while a call runs share the
// next call, because a call for one user costs Redis more than ten times as much as a user in a
// large call. The zero value is ready.
type enterBatches struct {
	mu     sync.Mutex
	queues map[enterKind]*enterQueue
}

// enterKind is what the calls of visitors must have in common to share one call of the script.
type enterKind struct {
	event string
	mode  waitingroom.Mode
	poll  time.Duration
}

// enterQueue holds the visitors who wait for the next call of enter of one kind. It exists while a
// call runs.
type enterQueue struct{ waiting []*enterCall }

// enterCall is the call of enterOne for one visitor, and its answer.
type enterCall struct {
	visitor waitingroom.Visitor
	done    chan struct{} // closed when reply or err is set
	reply   waitingroom.EnterReply
	err     error
}

// enterOne calls the script enter for one visitor. If a call of the same kind runs, the visitor
// waits for its end and shares the next one with all who came meanwhile. It waits for the answer
// even if ctx ends: the caller must know whether the visitor of a closed stream has a place.
func (b *shared) enterOne(ctx context.Context, kind enterKind, v waitingroom.Visitor) (waitingroom.EnterReply, error) {
	c := &enterCall{visitor: v, done: make(chan struct{})}
	b.enterBatches.mu.Lock()
	if b.enterBatches.queues == nil {
		b.enterBatches.queues = map[enterKind]*enterQueue{}
	}
	q := b.enterBatches.queues[kind]
	runs := q != nil
	if !runs {
		q = &enterQueue{}
		b.enterBatches.queues[kind] = q
	}
	q.waiting = append(q.waiting, c)
	b.enterBatches.mu.Unlock()
	if !runs {
		go b.runEnterQueue(context.WithoutCancel(ctx), kind, q)
	}
	<-c.done
	return c.reply, c.err
}

// runEnterQueue calls enter for those who wait in q, up to 200 at once, until nobody waits.
func (b *shared) runEnterQueue(ctx context.Context, kind enterKind, q *enterQueue) {
	for {
		b.enterBatches.mu.Lock()
		n := min(len(q.waiting), waitingroom.MostUsers)
		batch := q.waiting[:n]
		q.waiting = q.waiting[n:]
		if n == 0 {
			delete(b.enterBatches.queues, kind)
		}
		b.enterBatches.mu.Unlock()
		if n == 0 {
			return
		}
		b.enterBatch(ctx, kind, batch)
	}
}

// enterBatch calls enter once for several visitors.
func (b *shared) enterBatch(ctx context.Context, kind enterKind, batch []*enterCall) {
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
