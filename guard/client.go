// Package guard controls calls to something that is shared and limited: a downstream API with a
// rate limit, accounts, a file, a host. Processes that use the same Redis and the same names share
// the same guards.
//
//   - Limiter: permits per time, for any number of keys.
//   - Pool: members, for example accounts, of which the least recently used is lent. Each member
//     may have a limit, a circuit breaker and a number of leases at once.
//   - Semaphore, Lock and Breaker: pools with one member. PerKey: such a pool for each key.
//
// A lease is the right to use one member until a time. The Client renews it until its release. A
// holder that dies keeps its member until the lease ends. Calls that find no member stand in a
// queue: first in, first out, over all processes. Those of a Breaker, and those whose names begin
// with Try, don't.
//
// A lease can end while its holder is suspended and does not notice. Only the lease's fence
// protects what the guard guards: it grows with each lease of a guard, so a store that remembers
// the highest fence can refuse an older holder (see the example of Lock).
//
// All times are those of Redis, so clocks of processes do not matter. When its clock steps back,
// guards go on at normal speed; when it steps forward, leases and breakers end earlier by as much.
//
// When Redis is away, calls follow the Outage of their guard. A failover loses what the replica did
// not have yet: limits may be exceeded by that much, and a member may be lent twice until its
// old holder renews. Fences keep growing, unless the clock of the new server is behind.
package guard

import (
	"container/list"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
)

// Client is one process's access to guards. It is safe for concurrent use.
type Client struct {
	operations

	rdb redis.UniversalClient
	cfg config
	id  string // begins the id of each call, and names the channel on which grants are announced

	calls atomic.Uint64
	meter *meter

	checking chan struct{} // holds a token while a call checks the setup
	setup    atomic.Pointer[setupResult]

	guards guards
	mu     sync.Mutex
	closed bool

	tasks   sync.WaitGroup // goroutines of the Client
	renewer *renewer
	waits   *waits
	stopped chan struct{} // closed when the goroutines shall end
}

type config struct {
	prefix, process string
	allowEviction   bool
	meter           metric.Meter
	metricPrefix    string
	tracers         trace.TracerProvider
	logger          *slog.Logger
}

// Option is an option of New.
type Option func(*config)

// Prefix sets the prefix of all keys and channels; "guard:" by default. It must not hold a brace.
func Prefix(prefix string) Option { return func(c *config) { c.prefix = prefix } }

// Process sets a label of this process, which the Client adds to its log lines. It has no other
// effect.
func Process(label string) Option { return func(c *config) { c.process = label } }

// AllowEviction makes the Client accept a Redis that evicts keys when its memory is full; otherwise
// its calls fail with ErrSetup. A guard whose keys are evicted forgets its limits, leases and
// queue.
func AllowEviction() Option { return func(c *config) { c.allowEviction = true } }

// Meter sets the OpenTelemetry meter that records the metrics. Without this option the Client
// records no metrics.
func Meter(m metric.Meter) Option { return func(c *config) { c.meter = m } }

// MetricPrefix sets the prefix of the names of the metrics; "" by default, so that they begin with
// guard_ or redis_.
func MetricPrefix(prefix string) Option { return func(c *config) { c.metricPrefix = prefix } }

// TracerProvider sets the provider of spans. Without this option the Client makes no spans. With
// it, a call for a lease makes a span if its ctx has a span that records. Other calls make none.
func TracerProvider(p trace.TracerProvider) Option { return func(c *config) { c.tracers = p } }

// Logger sets the logger; slog.Default() by default.
func Logger(l *slog.Logger) Option { return func(c *config) { c.logger = l } }

// New returns a Client. It does no I/O and starts nothing: the first call of Client.Pool or for a
// lease or permit checks that Redis is suitable, and starts what it needs.
func New(rdb redis.UniversalClient, opts ...Option) *Client {
	cfg := config{prefix: "guard:", logger: slog.Default()}
	for _, o := range opts {
		o(&cfg)
	}
	if cfg.process != "" {
		cfg.logger = cfg.logger.With("process", cfg.process)
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	c := &Client{rdb: rdb, cfg: cfg, guards: guards{byName: map[string]*list.Element{}}}
	c.operations.c = c
	c.id = base64.RawURLEncoding.EncodeToString(random[:]) // Redis stores it twice for each lease
	c.stopped, c.checking = make(chan struct{}), make(chan struct{}, 1)
	c.meter = newMeter(c)
	c.renewer = newRenewer(c)
	c.waits = newWaits(c)
	return c
}

// Close removes this Client's calls from all queues, and waits until its leases are released. If
// ctx ends before, it closes Lost of the remaining leases and stops renewing them, so that they
// expire in Redis, and returns an error. Waiting calls, and later ones for leases and permits,
// return ErrClosed. The Redis client stays open. A repeated Close returns nil at once.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	c.mu.Unlock()
	if !first {
		return nil
	}
	close(c.waits.closing)
	select {
	case <-c.waits.left():
	case <-ctx.Done():
	}
	var err error
	select {
	case <-c.renewer.close():
	case <-ctx.Done():
		if n := c.renewer.loseAll(); n > 0 {
			err = fmt.Errorf("close guards: %d leases still held: %w", n, ctx.Err())
		}
	}
	close(c.stopped)
	defer c.meter.close()
	ended := make(chan struct{})
	go func() {
		c.tasks.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case <-ended:
		return err
	case <-time.After(100 * time.Millisecond):
		return errors.Join(err, fmt.Errorf("close guards: calls of Redis are still under way: %w", ctx.Err()))
	}
}

// start runs a task in a goroutine for which Close waits. After Close it runs nothing and returns
// false.
func (c *Client) start(task func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.tasks.Go(task)
	return true
}

func (c *Client) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

func (c *Client) newCall() string { return c.id + "-" + strconv.FormatUint(c.calls.Add(1), 36) }

// setupResult is the result of a check of Redis.
type setupResult struct {
	ended        time.Time
	err, publish error
	passed       bool // it is not repeated
}

// check returns an error if Redis can't hold guards or does not answer. A check that has passed is
// not repeated, but for the number of the layout. After a failed one, one call asks again at the earliest a second later, while other
// calls get the last result. queue is true for all guards but a Limiter: they need the right to
// PUBLISH.
func (c *Client) check(ctx context.Context, queue bool) error {
	r := c.setup.Load()
	if r == nil || !r.passed && time.Since(r.ended) > time.Second {
		var err error
		if r, err = c.checkAgain(ctx, r); err != nil {
			return err
		}
	}
	if r.err != nil {
		return r.err
	}
	if err := c.watchLayout(ctx, r); err != nil {
		return err
	}
	if queue {
		return r.publish
	}
	return nil
}

// checkAgain asks Redis again, replaces the result last and returns the new one. If another call
// already asks, it returns last, or waits for the new result if last is nil. It waits for 3 s at
// most.
func (c *Client) checkAgain(ctx context.Context, last *setupResult) (*setupResult, error) {
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	select {
	case c.checking <- struct{}{}:
	default:
		if last != nil {
			return last, nil
		}
		select {
		case c.checking <- struct{}{}:
		case <-limited.Done():
			return nil, c.unchecked(ctx)
		}
	}
	if now := c.setup.Load(); now != last {
		<-c.checking
		return now, nil
	}
	done := make(chan *setupResult, 1)
	if !c.start(func() { // go-redis may take longer than ctx
		r := checkSetup(context.WithoutCancel(ctx), c)
		r.ended = time.Now()
		c.setup.Store(r)
		done <- r
		<-c.checking
	}) {
		<-c.checking
		return nil, ErrClosed
	}
	select {
	case r := <-done:
		return r, nil
	case <-limited.Done():
	}
	if ctx.Err() == nil {
		c.setup.CompareAndSwap(last, &setupResult{err: c.unchecked(ctx), ended: time.Now()})
	}
	return nil, c.unchecked(ctx)
}

// unchecked returns the error of a call that got no result of check in time: the error of ctx, or
// else ErrUnavailable.
func (c *Client) unchecked(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: no answer within %v", ErrUnavailable, callTimeout)
}

func checkSetup(ctx context.Context, c *Client) *setupResult {
	r := &setupResult{}
	if strings.ContainsAny(c.cfg.prefix, "{}") {
		r.err = invalid("prefix %q: must not hold a brace", c.cfg.prefix)
		return r
	}
	if _, ring := c.rdb.(*redis.Ring); ring {
		r.err = fmt.Errorf("%w: redis.Ring spreads keys over servers that know nothing of each other; use Client, "+
			"FailoverClient or ClusterClient", ErrSetup)
		return r
	}
	if !c.cfg.allowEviction {
		policy, err := evictionPolicy(ctx, c.rdb)
		if err != nil {
			r.err = fmt.Errorf("%w: %w", ErrUnavailable, err)
			return r
		}
		if policy != "" && policy != "noeviction" {
			r.err = fmt.Errorf("%w: maxmemory-policy is %s, so Redis forgets guards when its memory is full; "+
				"set it to noeviction, or use AllowEviction", ErrSetup, policy)
			return r
		}
	}
	if err := c.checkLayout(ctx); err != nil {
		r.err = err
		return r
	}
	if err := c.rdb.Publish(ctx, channel(c), "").Err(); err != nil {
		if !isDenied(err) {
			r.err = fmt.Errorf("%w: %w", ErrUnavailable, err)
			return r
		}
		r.publish = fmt.Errorf("%w: %w", ErrNoPublish, err)
		return r
	}
	r.passed = true
	return r
}

// checkLayout checks that this version can use the guards' data. Programs whose Redis user may not
// read the number of its layout go on without.
func (c *Client) checkLayout(ctx context.Context) error {
	_, err := layout.Start(ctx, c.rdb, keyspace.GuardLayout(c.cfg.prefix),
		func() (bool, error) { return false, nil }, layout.GuardPart)
	switch {
	case err == nil || isDenied(err):
		return nil
	case errors.Is(err, layout.ErrUnsupported):
		return fmt.Errorf("%w: %w", ErrSetup, err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// watchLayout reads the number of the layout again if r is a second old: in the background, or if the
// Client was not used for so long that a migration may have passed meanwhile, before the call. It has
// no goroutine of its own, so a Client that is not used reads nothing.
func (c *Client) watchLayout(ctx context.Context, r *setupResult) error {
	age := time.Since(r.ended)
	if age < layout.Interval {
		return nil
	}
	look := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		err := c.checkLayout(ctx)
		if !errors.Is(err, ErrSetup) {
			return nil // also while Redis is away: the call itself will tell
		}
		c.cfg.logger.Error("guards can't be used any more", "error", err)
		c.setup.Store(&setupResult{err: err, ended: time.Now()})
		return err
	}
	if age > 3*layout.Interval {
		if err := look(ctx); err != nil {
			return err
		}
		c.renewSetup(r)
		return nil
	}
	select {
	case c.checking <- struct{}{}:
	default:
		return nil
	}
	c.renewSetup(r)
	if !c.start(func() { _ = look(context.Background()); <-c.checking }) {
		<-c.checking
	}
	return nil
}

// renewSetup notes that the number of the layout was, or is being, read again.
func (c *Client) renewSetup(r *setupResult) {
	now := *r
	now.ended = time.Now()
	c.setup.CompareAndSwap(r, &now)
}

// evictionPolicy returns Redis's setting maxmemory-policy; "" if Redis does not tell it. On a
// Cluster it prefers the policy of a master that evicts keys.
func evictionPolicy(ctx context.Context, rdb redis.UniversalClient) (string, error) {
	var found string
	err := eachMaster(ctx, rdb, func(ctx context.Context, c redis.Cmdable) error {
		policy, err := call.EvictionPolicy(ctx, c)
		if policy != "" && policy != "noeviction" || found == "" {
			found = policy
		}
		return err
	})
	return found, err
}

func isDenied(err error) bool { return strings.Contains(err.Error(), "NOPERM") }
