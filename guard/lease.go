package guard

import (
	"context"
	"strconv"
	"sync"
	"time"
)

// Lease is the right to use one member. The Client renews it until Release, so a lease is held for
// as long as its holder lives and reaches Redis.
type Lease struct {
	g      *shared
	call   string
	member string
	fence  int64
	probe  bool
	length time.Duration
	lost   chan struct{}

	mu    sync.Mutex
	until time.Time   // when it ends for its holder; others may have the member soon after
	timer *time.Timer // closes lost at until
	ended bool        // released or lost
}

// newLease returns the Lease of a granted call. sent is when the call was sent whose answer is the
// grant; the lease lasts from then on.
func (g *shared) newLease(call string, a answer, sent time.Time) *Lease {
	l := &Lease{
		g: g, call: call, member: a.member, fence: a.fence, probe: a.probe, length: a.lease, lost: make(chan struct{}),
	}
	l.until = l.end(sent)
	l.timer = time.AfterFunc(time.Until(l.until), l.lose)
	return l
}

// end returns when a lease ends for its holder, if it was granted or renewed by a call sent at
// sent. That is 20 ms and 5% of its length before Redis can end it, so that the holder stops before
// another one begins.
func (l *Lease) end(sent time.Time) time.Time {
	return sent.Add(l.length - (l.length/20 + 20*time.Millisecond))
}

// Member returns the id of the member.
func (l *Lease) Member() string { return l.member }

// Fence returns a number that grows with each lease of the guard. Give it to the store that the
// guard protects: it must refuse a write with a smaller fence than it has seen. It is 0 when the
// call was allowed because Redis is away.
func (l *Lease) Fence() int64 { return l.fence }

// Probe says whether the call probes a half-open breaker.
func (l *Lease) Probe() bool { return l.probe }

// Until returns the time at which Lost closes unless the lease is renewed or released before. Lost
// of a lease with fence 0 never closes.
func (l *Lease) Until() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.until
}

// Lost returns a channel that is closed when the lease has ended before its release. When it could
// not be renewed in time, Lost is closed before another call can have the member, as far as clocks
// allow: a suspended process notices it when it continues. When an operator took the lease back,
// Lost is closed at the next renewal, up to a third of the lease later; until then there may be two
// holders.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Release ends the lease and reports how the call went. It is no error if the lease has ended
// before; then the outcome does not count. After an error, Redis ends the lease at its time, unless
// the caller calls Release again.
func (l *Lease) Release(ctx context.Context, o Outcome) error {
	l.markEnded()
	defer l.g.c.renewer.remove(l) // at the end, so that Close waits until Redis has answered
	if l.fence == 0 {
		return nil
	}
	reply, err := l.g.send(ctx, releaseScript, releaseArgs(ending{call: l.call, fence: l.fenceText(), outcome: o}))
	if err != nil {
		return err
	}
	r, h, err := readRelease(reply)
	if err != nil {
		return err
	}
	l.g.note(h)
	l.g.c.meter.released(l.g, r)
	return nil
}

// releaseAnyway is Release for a caller whose ctx may have ended. It waits for Redis for 3 s at
// most.
func (l *Lease) releaseAnyway(ctx context.Context, o Outcome) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	return l.Release(ctx, o)
}

// ReleaseUnknown releases the lease of a member that this process can't use, for example because it
// lacks the member's secret. The outcome is Unused; the metric guard_unknown_member_total counts
// it.
func (l *Lease) ReleaseUnknown(ctx context.Context) error {
	l.g.c.meter.unknownMember(l.g, 1)
	return l.Release(ctx, Unused)
}

func (l *Lease) fenceText() string { return strconv.FormatInt(l.fence, 10) }

// markEnded marks the lease as ended in this process and stops its timer. It returns false if the
// lease was marked before.
func (l *Lease) markEnded() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	ended := l.ended
	l.ended = true
	if l.timer != nil {
		l.timer.Stop()
	}
	return !ended
}

func (l *Lease) isEnded() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended
}

func (l *Lease) lose() {
	if l.markEnded() {
		l.g.c.renewer.remove(l)
		close(l.lost)
	}
}

// extend moves the end of the lease after a successful renewal. sent is when the renewal was sent.
func (l *Lease) extend(sent time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	l.until = l.end(sent)
	l.timer.Reset(time.Until(l.until))
}

// renewer renews the leases of this process. One goroutine decides which guards are due. All leases
// of a guard are renewed together, each time a third of the shortest length has passed.
type renewer struct {
	c    *Client
	wake chan struct{}
	idle chan struct{} // closed when closed is set and no lease is left

	mu      sync.Mutex
	guards  map[*shared]*renewals
	held    int
	running bool
	closed  bool
	soonest time.Time // for which the loop's timer is set
}

// renewals are the leases of a guard.
type renewals struct {
	leases map[*Lease]struct{}
	due    time.Time
	busy   bool // a renewal is under way
}

func newRenewer(c *Client) *renewer {
	return &renewer{c: c, wake: make(chan struct{}, 1), idle: make(chan struct{}), guards: map[*shared]*renewals{}}
}

// add begins to renew a lease. It returns false after Close.
func (r *renewer) add(l *Lease) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	if l.isEnded() {
		return true // its reply took longer than the lease
	}
	if !r.running {
		if !r.c.start(r.loop) {
			return false
		}
		r.running = true
	}
	r.held++
	due := time.Now().Add(l.length / 3)
	of := r.guards[l.g]
	if of == nil {
		of = &renewals{leases: map[*Lease]struct{}{}, due: due}
		r.guards[l.g] = of
	}
	if !of.busy && due.Before(of.due) { // the guard had longer leases before
		of.due = due
	}
	if !of.busy && (r.soonest.IsZero() || of.due.Before(r.soonest)) {
		r.soonest = of.due
		poke(r.wake)
	}
	of.leases[l] = struct{}{}
	return true
}

func (r *renewer) remove(l *Lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := r.guards[l.g]
	if of == nil {
		return
	}
	if _, ok := of.leases[l]; !ok {
		return
	}
	delete(of.leases, l)
	r.held--
	if r.closed && r.held == 0 {
		close(r.idle)
	}
}

// close makes add refuse further leases. It returns a channel that is closed when no lease is left.
func (r *renewer) close() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.held == 0 {
		close(r.idle)
	}
	return r.idle
}

// loseAll closes Lost of all leases and returns their number. In Redis they end by themselves.
func (r *renewer) loseAll() int {
	r.mu.Lock()
	var all []*Lease
	for _, of := range r.guards {
		for l := range of.leases {
			all = append(all, l)
		}
	}
	r.mu.Unlock()
	for _, l := range all {
		l.lose()
	}
	return len(all)
}

// each calls f with each guard and the number of its leases.
func (r *renewer) each(f func(g *shared, held int)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for g, of := range r.guards {
		f(g, len(of.leases))
	}
}

func (r *renewer) loop() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(r.renewDue(time.Now()))
		select {
		case <-r.c.stopped:
			return
		case <-r.wake:
		case <-timer.C:
		}
	}
}

// renewDue starts the renewals of all guards that are due, and returns the time until the next
// guard is due.
func (r *renewer) renewDue(now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.soonest = now.Add(time.Hour)
	for g, of := range r.guards {
		if len(of.leases) == 0 {
			if !of.busy && !of.due.After(now) {
				delete(r.guards, g)
				continue
			}
		} else if !of.busy && !of.due.After(now) {
			of.busy = true
			leases := make([]*Lease, 0, len(of.leases))
			for l := range of.leases {
				leases = append(leases, l)
			}
			if !r.c.start(func() { r.renew(g, of, leases) }) {
				r.c.tasks.Go(func() { r.renew(g, of, leases) }) // the loop itself is a task, so Close still waits
			}
		}
		if !of.busy && of.due.Before(r.soonest) {
			r.soonest = of.due
		}
	}
	return r.soonest.Sub(now)
}

// renew renews leases of one guard, those of the same length together, and sets when the guard is
// due again: after a third of the shortest length, or after a twelfth if a renewal failed.
func (r *renewer) renew(g *shared, of *renewals, leases []*Lease) {
	byLength := map[time.Duration][]*Lease{}
	for _, l := range leases {
		byLength[l.length] = append(byLength[l.length], l)
	}
	shortest, failed := time.Duration(0), false
	for length, some := range byLength {
		if shortest == 0 || length < shortest {
			shortest = length
		}
		for len(some) > 0 {
			n := min(len(some), mostRenewalsPerCall)
			failed = !r.renewSome(g, length, some[:n]) || failed
			some = some[n:]
		}
	}
	pause := shortest / 3
	if failed {
		pause = shortest / 12
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for l := range of.leases { // some may have been added meanwhile
		pause = min(pause, l.length/3)
	}
	of.busy, of.due = false, time.Now().Add(pause)
	poke(r.wake)
}

func (r *renewer) renewSome(g *shared, length time.Duration, leases []*Lease) bool {
	ctx, cancel := context.WithTimeout(context.Background(), min(max(length/6, 50*time.Millisecond), callTimeout))
	defer cancel()
	sent := time.Now()
	reply, err := r.c.unpipelined(ctx, renewScript, g.keys, renewArgs(length, leases))
	if err != nil {
		g.warn("renewal of leases", "leases", len(leases), "error", err)
		return false
	}
	held, h, err := readRenew(reply, len(leases))
	if err != nil {
		g.warn("renewal of leases", "leases", len(leases), "error", err)
		return false
	}
	g.clock.set(h.at)
	for i, l := range leases {
		if held[i] {
			l.extend(sent)
		} else {
			l.lose()
		}
	}
	return true
}

// Outcome is how a call ended that used a lease. The caller decides what a failure is: a refused
// recipient, for example, is no failure of the account that sent the mail.
type Outcome int64

const (
	// Neutral says nothing about the member.
	Neutral Outcome = iota
	// Success counts for the breaker: it ends a row of failures, and enough successful probes close
	// a half-open breaker.
	Success
	// Failure counts for the breaker.
	Failure
	// Unused means that the holder did not call the member. The lease's permit is given back if it
	// can still be taken out of the limiter's data exactly.
	Unused

	throttled
)

const outcomeBits = 3

// Throttled says that the downstream API asks for a pause: the member is not lent for d, at most 24
// hours. It is no failure.
func Throttled(d time.Duration) Outcome {
	d = min(max(d, 0), 24*time.Hour)
	return throttled | Outcome(d.Milliseconds())<<outcomeBits
}

// letter returns the letter by which scripts know the outcome, and the pause of a Throttled one.
func (o Outcome) letter() (string, time.Duration) {
	switch o & (1<<outcomeBits - 1) {
	case Success:
		return "s", 0
	case Failure:
		return "f", 0
	case Unused:
		return "u", 0
	case throttled:
		return "t", time.Duration(o>>outcomeBits) * time.Millisecond
	}
	return "n", 0
}
