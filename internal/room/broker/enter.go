package broker

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// enterTimeout bounds one call of the script enter. The call serves several visitors, so it must
// not end with the request of one visitor.
const enterTimeout = 5 * time.Second

// enterBatches has a batcher for the calls of each kind that are under way: visitors who come while
// a call runs share the next one, because a call for one user costs Redis more than ten times as
// much as a user in a large call. The zero value is ready.
type enterBatches struct {
	mu     sync.Mutex
	byKind map[enterKind]*enterBatcher
}

// enterKind is what the calls of visitors must have in common to share one call of the script.
type enterKind struct {
	event string
	mode  waitingroom.Mode
	poll  time.Duration
}

type enterBatcher struct {
	*redisx.Batcher[*enterCall]
	calls int // that use it
}

// enterCall is the call of enterOne for one visitor, and its answer.
type enterCall struct {
	visitor waitingroom.Visitor
	reply   waitingroom.EnterReply
	err     error
}

func (e *enterBatches) use(kind enterKind) *enterBatcher {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.byKind[kind]
	if b == nil {
		if e.byKind == nil {
			e.byKind = map[enterKind]*enterBatcher{}
		}
		b = &enterBatcher{Batcher: redisx.NewBatcher[*enterCall](waitingroom.MostUsers)}
		e.byKind[kind] = b
	}
	b.calls++
	return b
}

func (e *enterBatches) leave(kind enterKind, b *enterBatcher) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b.calls--; b.calls == 0 {
		delete(e.byKind, kind)
	}
}

// enterOne calls the script enter for one visitor, in one call with others of the same kind. It
// waits for the answer even if ctx ends: the caller must know whether the visitor of a closed
// stream has a place.
func (b *shared) enterOne(ctx context.Context, kind enterKind, v waitingroom.Visitor) (waitingroom.EnterReply, error) {
	c := &enterCall{visitor: v}
	batcher := b.enterBatches.use(kind)
	defer b.enterBatches.leave(kind, batcher)
	err := batcher.Do(context.WithoutCancel(ctx), func(ctx context.Context, all []*enterCall) {
		b.enterBatch(ctx, kind, all)
	}, c)
	if err != nil {
		return waitingroom.EnterReply{}, err
	}
	return c.reply, c.err
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
	}
}
