package guard

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// Pool lends its members, the least recently used first.
//
// The member of a holder that dies is lent again when its lease ends. A call that waits in a
// process that dies is removed from the queue when its turn comes; it delays the others by at most
// 2 s. When Redis is away, calls follow Spec.OnOutage. After a failover or FLUSHALL a member may be
// lent twice, until its old holder renews: at most a third of a lease later. Steps of Redis's clock
// back change nothing; after a step forward, leases and open breakers end earlier by as much.
type Pool struct{ g *shared }

// Pool declares a pool and returns it. The declaration is stored in Redis: the newest one wins, or
// with Spec.Rev the one with the highest number. An older one, or another spec under the same
// number, is not stored: it is logged, and is no error. Call it once at the start of a process, and
// again to change the pool; it needs Redis, whatever Spec.OnOutage says. The error ErrInvalid names
// each field that is outside its limits; then nothing changes.
func (c *Client) Pool(ctx context.Context, name string, s Spec) (*Pool, error) {
	g := c.use(kindPool, name, func(*shared) {})
	if err := g.setSpec(s); err != nil {
		return nil, err
	}
	if err := c.check(ctx, true); err != nil {
		return nil, err
	}
	if err := g.declare(ctx); err != nil {
		return nil, err
	}
	return &Pool{g}, nil
}

// Semaphore returns a guard that lends n leases at once. A mistake in the name or in n is an error
// of each call. The lease of a holder that dies ends after 30 s. When Redis is away, calls return
// ErrUnavailable.
func (c *Client) Semaphore(name string, n int) *Pool {
	return &Pool{c.declared(kindSemaphore, name, Spec{Concurrency: n})}
}

// AcquireOption is an option of Acquire.
type AcquireOption func(*acquireConfig)

// TryOption is an option of TryAcquire.
type TryOption func(*acquireConfig)

type acquireConfig struct {
	wait   time.Duration
	member string
}

// MaxWait sets how long the call may stand in the queue; by default as long as Spec.MaxWait. 0 =
// not at all.
func MaxWait(d time.Duration) AcquireOption { return func(a *acquireConfig) { a.wait = d } }

// On makes TryAcquire lend only this member of a pool. A call for one member can't wait in the
// queue: to wait for one thing, use a PerKey.
func On(member string) TryOption { return func(a *acquireConfig) { a.member = member } }

// Acquire lends a member. If none can be lent now, the call stands in the queue until its turn, for
// at most MaxWait. A call that cannot succeed in that time is denied at once.
//
// Errors: *DeniedError, ErrQueueFull, ErrWaitTimeout, ErrUnavailable, ErrClosed, ErrInvalid,
// ErrSetup, ErrNoPublish, and the error of ctx.
func (p *Pool) Acquire(ctx context.Context, o ...AcquireOption) (*Lease, error) {
	spec, _, err := p.g.settings()
	if err != nil {
		return nil, err
	}
	cfg := acquireConfig{wait: spec.MaxWait}
	for _, option := range o {
		option(&cfg)
	}
	if cfg.wait < 0 || cfg.wait > time.Hour {
		return nil, fmt.Errorf("guard %s: %w", p.g.name, invalid("max wait %v: must be 0 to 1h", cfg.wait))
	}
	return p.g.acquire(ctx, cfg)
}

// TryAcquire lends a member, or answers at once with a *DeniedError. It does not overtake calls
// that stand in the queue. Errors as those of Acquire; ErrUnknownMember for On.
func (p *Pool) TryAcquire(ctx context.Context, o ...TryOption) (*Lease, error) {
	var cfg acquireConfig
	for _, option := range o {
		option(&cfg)
	}
	if cfg.member != "" {
		if err := checkMember(cfg.member); err != nil {
			return nil, fmt.Errorf("guard %s: %w", p.g.name, err)
		}
	}
	return p.g.acquire(ctx, cfg)
}

// Do acquires a lease, calls f and releases the lease. The outcome is Success if f returned nil,
// Neutral for an error of ctx, and Failure for another error or a panic. The ctx of f ends with
// cause ErrLost when the lease is lost. Do returns the error of Acquire, or those of f and of the
// release.
func (p *Pool) Do(ctx context.Context, f func(ctx context.Context, l *Lease) error) error {
	l, err := p.Acquire(ctx)
	if err != nil {
		return err
	}
	return l.do(ctx, f, outcomeOf)
}

func outcomeOf(ctx context.Context, err error) Outcome {
	switch {
	case err == nil:
		return Success
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return Neutral
	}
	return Failure
}

func (l *Lease) do(
	ctx context.Context, f func(context.Context, *Lease) error, judge func(context.Context, error) Outcome,
) (err error) {
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-l.lost:
			cancel(ErrLost)
		case <-stop:
		}
	}()
	outcome := Failure // of a panic
	defer func() {
		close(stop)
		<-watched
		err = errors.Join(err, l.releaseAnyway(ctx, outcome))
	}()
	err = f(inner, l)
	outcome = judge(ctx, err)
	return err
}

// Availability is what this process knows of a pool.
type Availability struct {
	Free      int       // members that could be lent by the last reply that said it; -1 = none yet
	Next      time.Time // when a member can be lent; zero = not known
	PerSecond float64   // leases a second that all members' rates allow; +Inf without rates, NaN for a wrong spec
}

// Availability returns what the latest replies of Redis said about the pool. It does no I/O.
func (p *Pool) Availability() Availability {
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	per := p.g.spec.perSecond()
	if p.g.broken != nil {
		per = math.NaN()
	}
	return Availability{Free: int(p.g.free), Next: p.g.nextAt, PerSecond: per}
}

// acquire makes one call for a lease, which waits in the queue if cfg.wait is above 0. When Redis
// is away and the outage policy is Open, it returns a lease that Redis does not know.
func (g *shared) acquire(ctx context.Context, cfg acquireConfig) (*Lease, error) {
	spec, packed, err := g.settings()
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("guard %s: %w", g.name, context.Cause(ctx))
	}
	if g.c.isClosed() {
		return nil, fmt.Errorf("guard %s: %w", g.name, ErrClosed)
	}
	began := time.Now()
	ctx, span := g.startSpan(ctx)
	id := g.c.newCall()
	var l *Lease
	if err = g.c.check(ctx, true); err != nil {
		err = fmt.Errorf("guard %s: %w", g.name, err)
	} else if cfg.wait == 0 {
		l, err = g.try(ctx, acquireArgs{call: id, client: g.c.id, member: cfg.member, spec: packed})
	} else {
		l, err = g.line(ctx, id, packed, spec.MaxQueue, began.Add(cfg.wait))
	}
	if errors.Is(err, ErrUnavailable) && spec.OnOutage == Open {
		l, err = g.lendWithoutRedis(), nil
	} else if l != nil && !g.c.renewer.add(l) {
		err = fmt.Errorf("guard %s: %w", g.name, errors.Join(ErrClosed, l.Release(ctx, Unused)))
		l = nil
	}
	g.c.meter.acquired(g, time.Since(began), l, err)
	if span != nil {
		endSpan(span, time.Since(began), l, err)
	}
	return l, err
}

// startSpan starts a span if ctx has a span that records. Otherwise the span is nil.
func (g *shared) startSpan(ctx context.Context) (context.Context, trace.Span) {
	if g.c.cfg.tracers == nil || !trace.SpanFromContext(ctx).IsRecording() {
		return ctx, nil
	}
	return g.c.cfg.tracers.Tracer("guard").Start(ctx, "guard acquire "+g.name)
}

func endSpan(span trace.Span, waited time.Duration, l *Lease, err error) {
	span.SetAttributes(attribute.Float64("waited_ms", float64(waited.Microseconds())/1000))
	if l != nil {
		span.SetAttributes(attribute.String("member", l.member), attribute.Int64("fence", l.fence))
	}
	if err != nil {
		span.SetAttributes(attribute.String("error", err.Error()))
	}
	span.End()
}

// try makes a call that does not wait.
func (g *shared) try(ctx context.Context, args acquireArgs) (*Lease, error) {
	a, sent, err := g.ask(ctx, args)
	if err != nil {
		if mayHaveArrived(ctx, err) {
			g.c.waits.cancelLater(g, args.call) // it may have been granted
		}
		return nil, err
	}
	if a.verdict == "GRANTED" {
		return g.newLease(args.call, a, sent), nil
	}
	return nil, g.refusal(a)
}

// ask sends a call for a lease to Redis. It returns the answer, and when the call was sent. It
// sends the call a second time if the first came too late (LATE), or if Redis does not know the
// pool: then it declares the pool first.
func (g *shared) ask(ctx context.Context, args acquireArgs) (answer, time.Time, error) {
	for tries := 0; ; tries++ {
		args.validUntil = g.clock.validUntil()
		sent := time.Now()
		reply, err := g.send(ctx, acquireScript, args.args())
		if err != nil {
			return answer{}, sent, err
		}
		a, h, err := readAcquire(reply)
		if err != nil {
			return answer{}, sent, fmt.Errorf("guard %s: %w", g.name, err)
		}
		g.note(h)
		switch {
		case tries > 0:
			return a, sent, nil
		case a.verdict == "LATE":
			continue
		case a.verdict == "UNKNOWN" && g.kind == kindPool && args.member == "":
			if err := g.declare(ctx); err != nil {
				return answer{}, sent, err
			}
			continue
		case a.verdict == "UNKNOWN" && g.kind == kindPool:
			if known, err := g.isDeclared(ctx); err != nil || known {
				return a, sent, err
			}
			if err := g.declare(ctx); err != nil {
				return answer{}, sent, err
			}
			continue
		}
		return a, sent, nil
	}
}

// refusal is the error of a call that was not granted.
func (g *shared) refusal(a answer) error {
	switch a.verdict {
	case "DENIED":
		d := &DeniedError{Guard: g.name, Reason: a.reason}
		if a.after >= 0 {
			d.After, d.Until = a.after, time.Now().Add(a.after)
		}
		return d
	case "FULL":
		return fmt.Errorf("guard %s: %w", g.name, ErrQueueFull)
	case "UNKNOWN":
		return fmt.Errorf("guard %s: %w", g.name, ErrUnknownMember)
	case "LATE":
		return fmt.Errorf("guard %s: %w: the call reached Redis too late, twice", g.name, ErrUnavailable)
	}
	return fmt.Errorf("guard %s: unexpected reply %q", g.name, a.verdict)
}

// line makes a call for a lease that may wait in the queue until the deadline. bound is the most
// calls that the queue may have. A call without a lease that may still be in Redis is cancelled.
func (g *shared) line(ctx context.Context, id, packed string, bound int, deadline time.Time) (*Lease, error) {
	w := g.c.waits
	if !w.begin() {
		return nil, fmt.Errorf("guard %s: %w", g.name, ErrClosed)
	}
	defer w.lines.Done()
	one := w.add(g, id)
	l, err := g.stand(ctx, one, packed, bound, deadline)
	w.remove(one)
	if l == nil && (one.queued || mayHaveArrived(ctx, err)) {
		w.cancelLater(g, id)
	}
	return l, err
}

// stand asks for a lease, and waits for its grant if Redis puts the call into the queue. If Redis
// loses the queue meanwhile, stand asks again under the same id.
func (g *shared) stand(ctx context.Context, one *waiter, packed string, bound int, deadline time.Time) (*Lease, error) {
	w := g.c.waits
	timeout := time.NewTimer(time.Until(deadline))
	defer timeout.Stop()
	for {
		left := time.Until(deadline)
		if end, ok := ctx.Deadline(); ok {
			left = min(left, time.Until(end))
		}
		left = max(left.Round(time.Millisecond), time.Millisecond)
		a, sent, err := g.ask(ctx, acquireArgs{call: one.id, client: g.c.id, spec: packed, wait: left, bound: bound})
		if err != nil {
			return nil, err
		}
		if a.verdict == "GRANTED" {
			return g.newLease(one.id, a, sent), nil
		}
		if a.verdict != "QUEUED" {
			return nil, g.refusal(a)
		}
		next := time.Duration(-1)
		if at := g.next(); !at.IsZero() {
			next = time.Until(at)
		}
		ask := w.queued(ctx, one, a.position, next)
		for a.verdict == "QUEUED" {
			if !ask {
				select { // a call whose time is over leaves by one of the last cases
				case <-one.hint:
					ask = true
				case a = <-one.found:
					sent = w.sentAt(one)
				case <-timeout.C:
					return nil, g.timedOut(ctx)
				case <-ctx.Done():
					return nil, g.timedOut(ctx)
				case <-w.closing:
					return nil, fmt.Errorf("guard %s: %w", g.name, ErrClosed)
				}
			}
			if ask {
				sent = time.Now()
				answers, _, err := w.ask(ctx, g, []string{one.id})
				if err == nil {
					a = answers[0]
				}
				// If this question to Redis timed out, the call asks again at once, because a grant
				// must be claimed within two seconds. After another error it leaves the question to
				// the next heartbeat.
				ask = errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && time.Now().Before(deadline)
			}
		}
		if a.verdict == "GRANTED" {
			return g.newLease(one.id, a, sent), nil
		}
	}
}

func (g *shared) next() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.nextAt
}

func (g *shared) timedOut(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("guard %s: %w", g.name, context.Cause(ctx))
	}
	if g.circuit.isOpen() {
		return fmt.Errorf("guard %s: %w", g.name, errors.Join(ErrWaitTimeout, ErrUnavailable))
	}
	return fmt.Errorf("guard %s: %w", g.name, ErrWaitTimeout)
}

// lendWithoutRedis returns a lease that Redis knows nothing of. Its fence is 0, and it is never
// renewed or lost.
func (g *shared) lendWithoutRedis() *Lease {
	spec, _, _ := g.settings()
	member := onlyMember
	if n := len(spec.Members); n > 0 {
		member = spec.Members[int(g.c.calls.Load()%uint64(n))].ID
	}
	return &Lease{g: g, member: member, until: time.Now().Add(spec.Lease), lost: make(chan struct{})}
}

// declare stores the spec and the members of a pool in Redis, piece by piece. If Redis has a
// declaration with a higher Rev, or with the same Rev and another spec, declare logs a warning and
// returns nil.
func (g *shared) declare(ctx context.Context) error {
	spec, _, err := g.settings()
	if err != nil {
		return err
	}
	packed, rev, members := spec.pack(0), spec.Rev, spec.Members
	for {
		n := min(len(members), mostMembersPerCall)
		piece, rest := members[:n], members[n:]
		last := 0
		if len(rest) == 0 {
			last = 1
		}
		args := append(make([]any, 0, 4+2*n), rev, packed, last, n)
		for _, m := range piece {
			args = append(args, m.ID, m.pack())
		}
		reply, err := g.send(ctx, declareScript, args)
		if err != nil {
			return fmt.Errorf("declare pool: %w", err)
		}
		r := declareScript.Reply(reply)
		stored, result, more := r.Number(), r.Code("SAME", "CHANGED", "OLDER"), r.Flag()
		if err := r.Err(); err != nil {
			return fmt.Errorf("declare pool %s: %w", g.name, err)
		}
		rev = stored
		if result == "OLDER" {
			g.c.cfg.logger.Warn("guard: a newer declaration of the pool is in use", "guard", g.name, "rev", stored)
			return nil
		}
		if more {
			members = nil // the same declaration again, without members, retires the others
			continue
		}
		if last == 1 {
			return nil
		}
		members = rest
	}
}

// isDeclared says whether Redis knows the guard, of any kind.
func (g *shared) isDeclared(ctx context.Context) (bool, error) {
	reply, err := g.send(ctx, inspectScript, []any{0, 0})
	return reply != nil, err
}
