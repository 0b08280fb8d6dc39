package guard

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

const (
	heartbeat   = time.Second            // sign of life of a client that waits
	claimTime   = 500 * time.Millisecond // timeout of one call of wait: a grant must be claimed within 2 s
	laterWake   = 250 * time.Millisecond // a client that does not have the first waiter asks so much later
	cancelTries = 10 * time.Second       // for how long a failed cancellation is repeated
)

// waits are the calls of this process that stand in queues. One goroutine reads the channel on
// which grants are announced, and sends the heartbeats.
type waits struct {
	c       *Client
	wake    chan struct{}
	closing chan struct{}  // closed by Close: all calls leave their queues
	lines   sync.WaitGroup // calls that may stand in a queue

	mu        sync.Mutex
	guards    map[*shared]*waiting
	calls     map[string]*waiter
	cancelled map[string]cancellation // cancellations that failed, by call id
	running   bool
	confirmed chan struct{} // closed when the subscription works
}

// waiting are the calls that wait for one guard.
type waiting struct {
	calls  map[string]*waiter
	beatAt time.Time // next heartbeat
	askAt  time.Time // when a member may be free; zero = unknown
	busy   bool      // a heartbeat is under way
}

type waiter struct {
	g      *shared
	id     string
	queued bool          // Redis has put it into the queue
	hint   chan struct{} // a grant was announced
	found  chan answer   // what a heartbeat has found
	sent   time.Time     // when that heartbeat was sent
}

type cancellation struct {
	g           *shared
	next, until time.Time
}

func newWaits(c *Client) *waits {
	return &waits{
		c: c, wake: make(chan struct{}, 1), closing: make(chan struct{}), guards: map[*shared]*waiting{},
		calls: map[string]*waiter{}, cancelled: map[string]cancellation{}, confirmed: make(chan struct{}),
	}
}

func channel(c *Client) string { return keyspace.GuardWake(c.cfg.prefix, c.id) }

// add registers a call before it is sent to Redis, because its grant may be announced before the
// reply has been read.
func (w *waits) add(g *shared, id string) *waiter {
	one := &waiter{g: g, id: id, hint: make(chan struct{}, 1), found: make(chan answer, 1)}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls[id] = one
	return one
}

func (w *waits) remove(one *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.calls, one.id)
	if of := w.guards[one.g]; of != nil {
		delete(of.calls, one.id)
		if len(of.calls) == 0 && !of.busy {
			delete(w.guards, one.g)
		}
	}
}

// queued registers a call that Redis has put into the queue, at a position. It subscribes to
// announcements and waits until that works, at most for claimTime. It returns true if the call must
// ask Redis once whether it was granted before.
func (w *waits) queued(ctx context.Context, one *waiter, position int64, next time.Duration) (ask bool) {
	w.mu.Lock()
	of := w.guards[one.g]
	if of == nil {
		of = &waiting{calls: map[string]*waiter{}, beatAt: time.Now().Add(jitter())}
		w.guards[one.g] = of
	}
	if !one.queued {
		one.queued = true
		w.c.meter.queued(one.g)
	}
	of.calls[one.id] = one
	if askAt := nextAsk(position == 1, next); of.askAt.IsZero() || !askAt.IsZero() && askAt.Before(of.askAt) {
		of.askAt = askAt
	}
	w.startLoop()
	w.mu.Unlock()
	poke(w.wake)
	select {
	case <-w.confirmed:
		return false
	default:
	}
	timer := time.NewTimer(claimTime)
	defer timer.Stop()
	select {
	case <-w.confirmed:
	case <-timer.C:
	case <-ctx.Done():
	}
	return true
}

// nextAsk returns when to ask Redis again whether a member is free; zero if that is not known. If
// first is true, this client has the first waiter; other clients ask 250 ms later.
func nextAsk(first bool, next time.Duration) time.Time {
	if next < 0 {
		return time.Time{}
	}
	if !first {
		next += laterWake
	}
	return time.Now().Add(next)
}

func jitter() time.Duration { return heartbeat*3/4 + rand.N(heartbeat/4) }

// poke wakes a loop; further calls before it runs do nothing.
func poke(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// loop reads announcements until Close. It must never block: on some servers PUBLISH would wait.
func (w *waits) loop() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	sub := w.c.rdb.Subscribe(ctx, channel(w.c))
	defer func() { _ = sub.Close() }() // it ends with its connection
	messages := sub.ChannelWithSubscriptions()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(w.beatDue(time.Now()))
		select {
		case <-w.c.stopped:
			return
		case <-w.wake:
		case <-timer.C:
		case m, ok := <-messages:
			if !ok {
				messages = nil // the Redis client was closed; heartbeats will say so
				continue
			}
			switch m := m.(type) {
			case *redis.Subscription:
				w.subscribed()
			case *redis.Message:
				w.announced(m.Payload)
			}
		}
	}
}

// subscribed is called when the subscription works. The first time, it closes confirmed. After a
// break, announcements may have been missed, so it makes all heartbeats due at once.
func (w *waits) subscribed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.confirmed:
	default:
		close(w.confirmed)
		return
	}
	now := time.Now()
	for _, of := range w.guards {
		of.beatAt = now
	}
}

// announced wakes the call of this id, whose grant was announced, so that it claims the grant. If
// the call's cancellation has failed before, announced repeats it, which gives the grant back.
func (w *waits) announced(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one := w.calls[id]; one != nil {
		poke(one.hint)
		return
	}
	if c, ok := w.cancelled[id]; ok {
		w.repeat(id, c)
	}
}

// repeat repeats a failed cancellation in the background. Close waits for it. The caller holds mu.
func (w *waits) repeat(id string, c cancellation) {
	delete(w.cancelled, id)
	again := func() { w.cancelUntil(c.g, id, c.until) }
	if !w.c.start(again) {
		w.c.tasks.Go(again)
	}
}

// beatDue starts heartbeats and cancellations that are due. It returns the time until the next one.
func (w *waits) beatDue(now time.Time) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	soonest := now.Add(time.Hour)
	for g, of := range w.guards {
		if of.busy {
			continue
		}
		if len(of.calls) == 0 {
			delete(w.guards, g)
			continue
		}
		due := of.beatAt
		if !of.askAt.IsZero() && of.askAt.Before(due) {
			due = of.askAt
		}
		if due.After(now) {
			if due.Before(soonest) {
				soonest = due
			}
			continue
		}
		ids := make([]string, 0, len(of.calls))
		for id := range of.calls {
			ids = append(ids, id)
		}
		of.busy, of.askAt, of.beatAt = true, time.Time{}, now.Add(jitter())
		if !w.c.start(func() { w.beat(g, of, ids) }) {
			of.busy = false
		}
	}
	for id, c := range w.cancelled {
		if now.Before(c.next) {
			if c.next.Before(soonest) {
				soonest = c.next
			}
			continue
		}
		w.repeat(id, c)
	}
	return soonest.Sub(now)
}

// beat sends a heartbeat: it asks for all calls that wait for a guard, and hands out the answers.
func (w *waits) beat(g *shared, of *waiting, ids []string) {
	var last hint
	first, answered := false, false
	for len(ids) > 0 {
		some := ids[:min(len(ids), mostWaitsPerCall)]
		ids = ids[len(some):]
		sent := time.Now()
		answers, h, err := w.ask(context.Background(), g, some)
		if err != nil {
			g.warn("heartbeat", "waiting", len(some), "error", err)
			break
		}
		last, answered = h, true
		for i, a := range answers {
			first = first || a.position == 1
			if a.verdict != "QUEUED" {
				w.deliver(some[i], a, sent)
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	of.busy = false
	if answered {
		of.askAt = nextAsk(first, last.next)
	}
	poke(w.wake)
}

// deliver hands the answer of a heartbeat to the call that waits for it. A call that is not
// registered any more needs none: it has claimed its grant, or is cancelled.
func (w *waits) deliver(id string, a answer, sent time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one := w.calls[id]; one != nil {
		one.sent = sent
		select {
		case one.found <- a:
		default:
		}
	}
}

// ask runs the script wait, which claims the grants of ids and records that the client is alive.
func (w *waits) ask(ctx context.Context, g *shared, ids []string) ([]answer, hint, error) {
	ctx, cancel := context.WithTimeout(ctx, claimTime)
	defer cancel()
	began := time.Now()
	reply, err := w.c.unpipelined(ctx, waitScript, g.keys, waitArgs(w.c.id, ids))
	w.c.meter.called(waitScript.Name(), time.Since(began))
	if err := g.judge(ctx, err, began); err != nil {
		return nil, hint{}, err
	}
	answers, h, err := readWait(reply, len(ids))
	if err == nil {
		g.note(h)
	}
	return answers, h, err
}

// cancel takes a call out of the guard's queue in Redis, or gives its grant back. If that fails, it
// is repeated for 10 s.
func (w *waits) cancel(g *shared, id string) { w.cancelUntil(g, id, time.Now().Add(cancelTries)) }

func (w *waits) cancelUntil(g *shared, id string, until time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), claimTime)
	defer cancel()
	// in the pipeline of acquire, so that it can't reach Redis before the call's own acquire
	reply, err := w.c.pipelined(ctx, releaseScript, g.keys, releaseArgs(ending{call: id, outcome: Unused}))
	if err == nil {
		var h hint
		if _, h, err = readRelease(reply); err == nil {
			g.note(h)
			return
		}
	}
	now := time.Now()
	if now.After(until) {
		return // its lease or its turn ends by itself
	}
	w.mu.Lock()
	w.cancelled[id] = cancellation{g: g, next: now.Add(heartbeat), until: until}
	w.startLoop()
	w.mu.Unlock()
	poke(w.wake)
}

// begin counts a call that may stand in a queue, so that Close waits for it; it returns false after
// Close. The caller calls lines.Done.
func (w *waits) begin() bool {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if !w.c.closed {
		w.lines.Add(1)
	}
	return !w.c.closed
}

// left returns a channel that is closed when no call of this Client stands in a queue any more.
func (w *waits) left() <-chan struct{} {
	left := make(chan struct{})
	go func() {
		w.lines.Wait()
		close(left)
	}()
	return left
}

// cancelLater cancels a call whose caller has given up: in the background; after Close, itself.
func (w *waits) cancelLater(g *shared, id string) {
	if !w.c.start(func() { w.cancel(g, id) }) {
		w.cancel(g, id)
	}
}

// sentAt returns when the heartbeat was sent that has brought the answer of this waiting call.
func (w *waits) sentAt(one *waiter) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return one.sent
}

func (w *waits) startLoop() {
	if !w.running {
		w.running = w.c.start(w.loop)
	}
}

// each calls f with each guard and the number of calls that wait for it.
func (w *waits) each(f func(g *shared, queued int)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for g, of := range w.guards {
		f(g, len(of.calls))
	}
}
