package guard

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// The kinds of guards; a kind is a part of the key.
const (
	kindPool      = "pool"
	kindBreaker   = "breaker"
	kindLock      = "lock"
	kindSemaphore = "semaphore"
	kindKey       = "key"
	kindLimiter   = "limiter" // it has no members
)

// onlyMember is the member of each guard but a pool.
const onlyMember = "1"

// callTimeout bounds one call to Redis.
const callTimeout = 3 * time.Second

// shared is one guard, as this process uses it.
type shared struct {
	c          *Client
	kind, name string
	label      string // name in metrics
	keys       []string
	broken     error // a mistake in the name or the spec
	clock      guardClock
	circuit    circuit

	mu     sync.Mutex
	spec   Spec   // with defaults
	packed string // what acquire sends; empty for a pool
	free   int64
	nextAt time.Time // when a member can be lent; zero = unknown
	warned time.Time
}

// mostGuards is how many guards a Client remembers at most, the most recently used. There may be
// any number of names of locks and of guards per key. A forgotten guard still works for its present
// users.
const mostGuards = 10_000

// guards are the guards that a Client has used last.
type guards struct {
	mu     sync.Mutex
	byName map[string]*list.Element // by KIND/NAME
	recent list.List                // of *shared, the most recently used first
}

// use returns the guard of a kind and a name, as an object that all users in this process share. It
// calls prepare with a new object before others can see it.
func (c *Client) use(kind, name string, prepare func(g *shared)) *shared {
	full := kind + "/" + name
	c.guards.mu.Lock()
	defer c.guards.mu.Unlock()
	if e := c.guards.byName[full]; e != nil {
		c.guards.recent.MoveToFront(e)
		return e.Value.(*shared)
	}
	g := newShared(c, kind, name)
	ofKeys, _, _ := strings.Cut(name, "/") // the guards of a PerKey have one label
	g.label = c.meter.label(ofKeys)
	if kind == kindPool {
		c.meter.unknownMember(g, 0) // without a 0 before it, the first one is no increase
	}
	prepare(g)
	c.guards.byName[full] = c.guards.recent.PushFront(g)
	if len(c.guards.byName) > mostGuards {
		oldest := c.guards.recent.Remove(c.guards.recent.Back()).(*shared)
		delete(c.guards.byName, oldest.kind+"/"+oldest.name)
	}
	return g
}

// used returns the guards that the Client remembers.
func (c *Client) used() []*shared {
	c.guards.mu.Lock()
	defer c.guards.mu.Unlock()
	all := make([]*shared, 0, len(c.guards.byName))
	for e := c.guards.recent.Front(); e != nil; e = e.Next() {
		all = append(all, e.Value.(*shared))
	}
	return all
}

// declared returns the guard of a kind and a name, and sets its spec in this process; the spec set
// last wins. An invalid spec is an error of each later call.
func (c *Client) declared(kind, name string, spec Spec) *shared {
	g := c.use(kind, name, func(*shared) {})
	if err := g.setSpec(spec); err != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.broken = err
	}
	return g
}

func newShared(c *Client, kind, name string) *shared {
	return &shared{
		c: c, kind: kind, name: name, free: -1,
		keys: guardKeys(keyspace.GuardBase(c.cfg.prefix, kind, name)),
	}
}

// setSpec sets the spec that this process sends with its calls. If the name or the spec is wrong,
// it returns an error and changes nothing.
func (g *shared) setSpec(spec Spec) error {
	var errs []error
	if g.kind == kindSemaphore && spec.Concurrency < 1 {
		errs = append(errs, invalid("%d leases at once: must be 1 to 1000000", spec.Concurrency))
	}
	spec = spec.withDefaults()
	errs = append(errs, spec.check(g.kind)...)
	if g.kind != kindKey { // PerKey has checked its name and made the key
		errs = append([]error{checkName(g.name)}, errs...)
	}
	if err := joinMistakes(errs...); err != nil {
		return fmt.Errorf("guard %s: %w", g.name, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.broken = nil
	if spec.OnOutage == "" {
		spec.OnOutage = Closed
		if g.kind == kindBreaker {
			spec.OnOutage = Open
		}
	}
	g.spec = spec
	if g.kind != kindPool {
		g.packed = spec.pack(spec.ttl(g.kind))
	}
	return nil
}

func (g *shared) settings() (Spec, string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.spec, g.packed, g.broken
}

// note stores what a reply says about the whole guard: guard time, how many members can be lent,
// and when the next one can be.
func (g *shared) note(h hint) {
	if h.at > 0 {
		g.clock.set(h.at)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if h.free >= 0 {
		g.free = h.free
	}
	if h.next >= 0 {
		g.nextAt = time.Now().Add(h.next)
	} else {
		g.nextAt = time.Time{}
	}
}

// warn logs that a task failed which will be repeated, at most once in ten seconds for each guard.
func (g *shared) warn(task string, args ...any) {
	g.mu.Lock()
	now := time.Now()
	silent := now.Sub(g.warned) < 10*time.Second
	if !silent {
		g.warned = now
	}
	g.mu.Unlock()
	if !silent {
		args = append([]any{"guard", g.name, "task", task}, args...)
		g.c.cfg.logger.Warn("guard: task failed, it is repeated", args...)
	}
}

// guardClock estimates guard time from the last reply.
type guardClock struct{ last atomic.Pointer[reading] }

type reading struct {
	micros int64
	at     time.Time
}

func (k *guardClock) set(micros int64) { k.last.Store(&reading{micros: micros, at: time.Now()}) }

// validUntil returns the guard time, µs, after which a call that is sent now comes too late; 0
// before the first reply.
func (k *guardClock) validUntil() int64 {
	r := k.last.Load()
	if r == nil {
		return 0
	}
	return r.micros + (time.Since(r.at) + callTimeout).Microseconds()
}

// circuit keeps this process from sending calls of one guard while Redis is away: for 100 ms after
// the first failure, then twice as long each time, up to one second. After each pause, one call
// tries Redis again. Renewals, heartbeats, claims and cancellations are sent nevertheless.
type circuit struct {
	mu     sync.Mutex
	until  time.Time
	pause  time.Duration
	trying bool
}

const (
	firstPause = 100 * time.Millisecond
	mostPause  = time.Second
)

// allow says whether a call may be sent. If so, the caller reports its end by answered or failed.
func (k *circuit) allow() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pause == 0 {
		return true
	}
	if k.trying || time.Now().Before(k.until) {
		return false
	}
	k.trying = true
	return true
}

// answered notes that Redis has answered: calls may be sent again.
func (k *circuit) answered() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pause, k.trying = 0, false
}

// failed records that a call got no answer from Redis. gaveUp: the caller's context ended so soon
// that this says nothing about Redis, so no pause begins.
func (k *circuit) failed(gaveUp bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now := time.Now(); !gaveUp && (k.trying || now.After(k.until)) {
		k.pause = min(max(2*k.pause, firstPause), mostPause)
		k.until = now.Add(k.pause)
	}
	k.trying = false
}

func (k *circuit) isOpen() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pause > 0
}

// send runs a script of a guard. It returns ErrUnavailable when Redis can't serve the call now.
func (g *shared) send(ctx context.Context, s *call.Script, args []any) (any, error) {
	if !g.circuit.allow() {
		return nil, fmt.Errorf("guard %s: %w", g.name, errNotSent)
	}
	began := time.Now()
	reply, err := g.c.pipelined(ctx, s, g.keys, args)
	g.c.meter.called(s.Name(), time.Since(began))
	return reply, g.judge(ctx, err, began)
}

// longAnswer is how long a call must have waited, before its caller gave up, to count as a failure
// of Redis. Without it, callers with short deadlines would never notice that Redis hangs.
const longAnswer = 250 * time.Millisecond

// judge tells the circuit whether a call got an answer, and returns the call's error as an error of
// this package. began is when the call was sent.
func (g *shared) judge(ctx context.Context, err error, began time.Time) error {
	gaveUp := ctx.Err() != nil && errors.Is(err, ctx.Err())
	unavailable, away := outage(err)
	if away || gaveUp {
		g.circuit.failed(gaveUp && time.Since(began) < longAnswer)
	} else {
		g.circuit.answered()
	}
	switch {
	case err == nil:
		return nil
	case gaveUp:
		return fmt.Errorf("guard %s: %w", g.name, context.Cause(ctx))
	case unavailable:
		return fmt.Errorf("guard %s: %w: %w", g.name, ErrUnavailable, err)
	case isDenied(err):
		return fmt.Errorf("guard %s: the Redis user lacks a right: %w", g.name, err)
	}
	return fmt.Errorf("guard %s: %w", g.name, err)
}

// pipelined runs a script through go-redis's automatic pipelining: calls that arrive while a batch
// is under way are sent together in the next batch. So a lease costs only a few µs. It waits for
// 3 s at most. The feature is experimental in go-redis, so no other function of this package uses
// it.
func (c *Client) pipelined(ctx context.Context, s *call.Script, keys []string, args []any) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	p, err := c.rdb.AsyncAutoPipeline()
	if err != nil {
		return s.Run(ctx, c.rdb, keys, args)
	}
	return s.Run(ctx, submitter{Cmdable: c.rdb, pipeline: p}, keys, args)
}

// submitter runs scripts by a pipeline, and gives up waiting when the caller's context ends.
type submitter struct {
	redis.Cmdable
	pipeline *redis.AutoPipeliner
}

func (s submitter) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, "evalsha", sha, len(keys))
	for _, k := range keys {
		all = append(all, k)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	cmd.SetFirstKeyPos(3)
	if err := s.pipeline.Submit(ctx, cmd).WaitContext(ctx); err != nil && ctx.Err() != nil {
		failed := redis.NewCmd(ctx, all[:2]...) // cmd itself may still be written
		failed.SetErr(err)
		return failed
	}
	return cmd
}

// unpipelined runs a script outside of the pipeline. It returns when ctx ends, although go-redis
// may take longer. After Close it waits for go-redis.
func (c *Client) unpipelined(ctx context.Context, s *call.Script, keys []string, args []any) (any, error) {
	type result struct {
		reply any
		err   error
	}
	done := make(chan result, 1)
	ok := c.start(func() {
		reply, err := s.Run(context.WithoutCancel(ctx), c.rdb, keys, args)
		done <- result{reply, err}
	})
	if !ok {
		return s.Run(ctx, c.rdb, keys, args)
	}
	select {
	case r := <-done:
		return r.reply, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
