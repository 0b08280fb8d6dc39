package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Query selects a page of guards.
type Query struct {
	Kind   string // one of Kinds; "" = all kinds but key
	Cursor string // of the page before; "" = the first page
	Limit  int    // the most guards on the page; 0 = 50, at most 1,000
}

// The bounds of one page. It takes at most scanSteps calls of SCAN over scanCount keys each.
// Without Query.Limit it has at most fewListed guards; mostListed is the largest limit. It reads
// readAtOnce guards together.
const (
	readAtOnce = 100
	scanSteps  = 100
	scanCount  = 1000
	mostListed = 1000
	fewListed  = 50
)

// List returns a page of the guards that Redis knows, in no particular order; those of a PerKey only if Kind
// is key. A page may have fewer guards than Limit, or none, although more pages follow (its Cursor
// is not ""): one page searches at most 100,000 keys of Redis. A guard that is made, or that
// expires, while pages are read may be missing, and a guard may be on two pages.
func (o operations) List(ctx context.Context, q Query) (api.GuardList, error) {
	if q.Kind != "" && !slices.Contains(Kinds, q.Kind) {
		return api.GuardList{}, invalid("kind %.40q: must be %s", q.Kind, strings.Join(Kinds, ", "))
	}
	q.Limit = min(cmp.Or(max(q.Limit, 0), fewListed), mostListed)
	names, next, err := o.names(ctx, q)
	if err != nil {
		return api.GuardList{}, err
	}
	l := api.GuardList{Guards: make([]api.GuardSummary, 0, len(names)), Cursor: next}
	for some := range slices.Chunk(names, readAtOnce) {
		// The calls of one chunk go to Redis together: see Client.pipelined.
		sums, errs := make([]api.GuardSummary, len(some)), make([]error, len(some))
		var reads sync.WaitGroup
		for i, name := range some {
			reads.Go(func() { sums[i], errs[i] = o.summary(ctx, name) })
		}
		reads.Wait()
		for i, err := range errs {
			switch {
			case err == nil:
				l.Guards = append(l.Guards, sums[i])
			case !errors.Is(err, ErrUnknownGuard): // else it has expired since
				return api.GuardList{}, err
			}
		}
	}
	return l, nil
}

// Guards returns the names (KIND/NAME) of all guards with members of this prefix, sorted. Those of a
// PerKey, one for each key, are left out unless keys is set. It goes over the names of all keys in
// Redis.
func (o operations) Guards(ctx context.Context, keys bool) ([]string, error) {
	var all []string
	for _, q := range []Query{{}, {Kind: kindKey}} {
		if q.Kind == kindKey && !keys {
			break
		}
		q.Limit = mostListed
		for {
			names, next, err := o.names(ctx, q)
			if err != nil {
				return nil, err
			}
			all = append(all, withMembers(names)...)
			if q.Cursor = next; next == "" {
				break
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// withMembers returns the names without those of limiters.
func withMembers(names []string) []string {
	return slices.DeleteFunc(names, func(name string) bool { return strings.HasPrefix(name, kindLimiter+"/") })
}

// mostKeys is how many keys of a limiter Keys returns at most.
const mostKeys = 100

// Keys returns keys of a limiter, at most 100, by the name of the guard: limiter/NAME. A key is
// known from its first Take until a minute after all of its permits are there again. more is true
// if there may be others: Keys searches at most 100,000 keys of Redis.
func (o operations) Keys(ctx context.Context, name string) (keys []string, more bool, err error) {
	prefix := o.c.cfg.prefix
	pattern := keyspace.LimiterPattern(prefix, strings.TrimPrefix(name, kindLimiter+"/"))
	servers, err := masters(ctx, o.c.rdb)
	for step, cursor := 0, uint64(0); err == nil && len(servers) > 0; step++ {
		var found []string
		found, cursor, err = servers[0].Scan(ctx, cursor, pattern, scanCount).Result()
		for _, key := range found {
			_, key, _ = strings.Cut(strings.TrimPrefix(key, prefix), "/") // limit:{NAME/KEY}
			keys = append(keys, strings.TrimSuffix(key, "}"))
		}
		if cursor == 0 {
			servers = servers[1:]
		}
		if len(keys) > mostKeys || step == scanSteps && len(servers) > 0 {
			more = true
			break
		}
	}
	if unavailable, _ := outage(err); unavailable {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	return keys[:min(len(keys), mostKeys)], more, err
}

// position is where a page of List begins: the server, the cursor of SCAN on it, and the last name
// that earlier pages have returned of this SCAN call's names; "" if none.
type position struct {
	server int
	cursor uint64
	after  string
}

func (p position) String() string { return fmt.Sprintf("%d.%d.%s", p.server, p.cursor, p.after) }

func parsePosition(text string) (p position, ok bool) {
	if text == "" {
		return p, true
	}
	parts := strings.SplitN(text, ".", 3)
	if len(parts) != 3 {
		return p, false
	}
	server, err := strconv.ParseUint(parts[0], 10, 16)
	if err != nil {
		return p, false
	}
	cursor, err := strconv.ParseUint(parts[1], 10, 64)
	return position{int(server), cursor, parts[2]}, err == nil
}

// names returns the names of one page of guards, and the cursor of the next page; "" after the last
// one. The error is ErrInvalid for a text that has not the form of a cursor.
func (o operations) names(ctx context.Context, q Query) (names []string, next string, err error) {
	at, ok := parsePosition(q.Cursor)
	if !ok {
		return nil, "", invalid("cursor %.40q: must be the cursor of an earlier page", q.Cursor)
	}
	servers, err := masters(ctx, o.c.rdb)
	for step := 0; err == nil && at.server < len(servers); step++ {
		if step == scanSteps {
			return names, at.String(), nil
		}
		var found []string
		var cursor uint64
		found, cursor, err = o.scanOnce(ctx, servers[at.server], q.Kind, at)
		if room := q.Limit - len(names); len(found) > room {
			names = append(names, found[:room]...)
			if room > 0 {
				at.after = found[room-1]
			}
			return names, at.String(), nil
		}
		names = append(names, found...)
		at = position{server: at.server, cursor: cursor}
		if cursor == 0 {
			at.server++
		}
	}
	if err != nil {
		if unavailable, _ := outage(err); unavailable {
			err = fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		return nil, "", fmt.Errorf("list guards: %w", err)
	}
	return names, "", nil
}

// scanOnce calls SCAN once, at a position. It returns the names of guards that sort behind
// at.after, sorted, and the cursor of the next SCAN call; 0 after the last one.
func (o operations) scanOnce(
	ctx context.Context, server redis.Cmdable, kind string, at position,
) (names []string, next uint64, err error) {
	prefix := o.c.cfg.prefix
	keys, next, err := server.Scan(ctx, at.cursor, keyspace.GuardPattern(prefix, kind), scanCount).Result()
	for _, key := range keys {
		name := strings.TrimSuffix(strings.TrimPrefix(key, prefix+"guard:{"), "}:guard")
		found, _, ok := ParseName(name)
		if ok && name > at.after && (found != kindKey || kind == kindKey) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), next, err
}

// summary reads the counters and sizes of a guard, and none of its members.
func (o operations) summary(ctx context.Context, name string) (api.GuardSummary, error) {
	g, err := o.named(name)
	if err != nil {
		return api.GuardSummary{}, err
	}
	reply, err := g.send(ctx, inspectScript, []any{0, 0})
	if err != nil {
		return api.GuardSummary{}, err
	}
	if reply == nil {
		return api.GuardSummary{}, fmt.Errorf("guard %s: %w", name, ErrUnknownGuard)
	}
	r := inspectScript.Reply(reply)
	head, sizes := readHead(r.List()), r.List()
	sum := api.GuardSummary{Name: name, Rev: head.rev, Counters: head.counters}
	sum.Members, sum.Free, sum.Cooling = sizes.Number(), sizes.Number(), sizes.Number()
	sum.Leases, sum.Queue = sizes.Number(), sizes.Number()
	sizes.Skip()
	r.Skip()
	return call.Done(r, sum)
}

// Breaker is a circuit breaker that processes share through Redis. Once open, it stays open for its
// time, even if no process uses it or Redis's clock steps back. A step forward of the clock
// shortens that time. FLUSHALL closes the breaker, and so can an operator.
type Breaker struct{ g *shared }

// BreakerOption is an option of Breaker.
type BreakerOption interface{ toBreaker(*Spec) }

// Breaker returns a circuit breaker. It is closed until b.Failures calls in a row have failed; then
// it is open for b.OpenFor; then it is half-open: it lets at most b.Successes probes through at
// once, and closes when b.Successes have succeeded. A probe that fails, or whose process dies,
// opens it again. The outcome of a call that began before a change of state does not count. A
// mistake in the name or in b is an error of each call.
func (c *Client) Breaker(name string, b BreakerPolicy, o ...BreakerOption) *Breaker {
	spec := Spec{Breaker: b, Concurrency: Unbounded}
	for _, option := range o {
		option.toBreaker(&spec)
	}
	g := c.declared(kindBreaker, name, spec)
	if b == (BreakerPolicy{}) {
		g.mu.Lock()
		g.broken = joinMistakes(g.broken, invalid("breaker %s: failures 0: must be 1 to 1000000", name))
		g.mu.Unlock()
	}
	return &Breaker{g}
}

// Allow asks whether a call may be made. If so, done must be called with its outcome. Otherwise the
// error is a *DeniedError. Its reason is CircuitOpen; RateLimited after an outcome Throttled; or
// Disabled. Further errors as those of TryAcquire. When Redis is away the call is allowed, unless
// the option OnOutage says otherwise.
func (b *Breaker) Allow(ctx context.Context) (done func(Outcome), err error) {
	l, err := b.g.acquire(ctx, acquireConfig{})
	if err != nil {
		return nil, err
	}
	return func(o Outcome) {
		if err := l.releaseAnyway(ctx, o); err != nil {
			b.g.c.cfg.logger.Warn("guard: the outcome of a call was lost", "guard", b.g.name, "error", err)
		}
	}, nil
}

// Do calls f if the breaker allows it, and reports the outcome: Success if f returned nil, Neutral
// for an error of ctx, Failure for another error or a panic. It returns the error of f, or that of
// Allow if f was not called.
func (b *Breaker) Do(ctx context.Context, f func(ctx context.Context) error) error {
	done, err := b.Allow(ctx)
	if err != nil {
		return err
	}
	outcome := Failure
	defer func() { done(outcome) }()
	err = f(ctx)
	outcome = outcomeOf(ctx, err)
	return err
}

// Lock is a lock that processes share. It is not reentrant.
//
// A holder that dies keeps the lock until its TTL has passed since the last renewal. When Redis's
// clock steps forward, the lock may end earlier by as much. When Redis is away, nobody can lock,
// and Lost of the present lease closes before its TTL ends. A lock is kept on one Redis master:
// after a failover or FLUSHALL it may be held twice, for at most a third of its TTL. A holder that
// was suspended may not notice that it has lost the lock. So give the lease's fence to the store
// that the lock protects; the store must refuse a smaller fence than it has seen (see the example).
type Lock struct {
	g    *shared
	wait time.Duration
}

// LockOption is an option of Lock.
type LockOption func(*Spec)

// TTL sets after what time the lock of a dead holder is free; 30 s by default.
func TTL(d time.Duration) LockOption { return func(s *Spec) { s.Lease = d } }

// LockMaxWait sets how long Lock waits; 60 s by default.
func LockMaxWait(d time.Duration) LockOption { return func(s *Spec) { s.MaxWait = d } }

// Lock returns a lock. A mistake in the name or in an option is an error of each call.
func (c *Client) Lock(name string, o ...LockOption) *Lock {
	spec := Spec{OnOutage: Closed}
	for _, option := range o {
		option(&spec)
	}
	return &Lock{g: c.declared(kindLock, name, spec), wait: spec.withDefaults().MaxWait}
}

// TryLock locks, or answers at once with a *DeniedError; further errors as those of
// Pool.TryAcquire. To unlock, release the lease with Neutral.
func (k *Lock) TryLock(ctx context.Context) (*Lease, error) {
	return k.g.acquire(ctx, acquireConfig{})
}

// Lock locks; it waits in the queue for at most the option LockMaxWait. Errors as those of
// Pool.Acquire. To unlock, release the lease with Neutral.
func (k *Lock) Lock(ctx context.Context) (*Lease, error) {
	return k.g.acquire(ctx, acquireConfig{wait: k.wait})
}

// Do locks, calls f and unlocks. The ctx of f ends with cause ErrLost when the lock is lost. Do
// returns the error of Lock, or those of f and of the release.
func (k *Lock) Do(ctx context.Context, f func(ctx context.Context, l *Lease) error) error {
	l, err := k.Lock(ctx)
	if err != nil {
		return err
	}
	return l.do(ctx, f, func(context.Context, error) Outcome { return Neutral })
}

// PerKey makes a guard for each key, for example for each host. Each is a Pool with one member.
type PerKey struct {
	c    *Client
	name string
	spec Spec
	err  error
}

// PerKey returns guards with the same spec, one for each key. The spec has no Members. Redis
// forgets the guard of a key 30 to 60 minutes after its last use, or later if a lease, window or
// OpenFor is long; until then it needs about 1 KB. Call it once: keys in use keep the spec with
// which they were first used.
func (c *Client) PerKey(name string, s Spec) *PerKey {
	p := &PerKey{c: c, name: name, spec: s}
	if !validID(name) {
		p.err = fmt.Errorf("guard %.140q: %w", name, invalid("name: must be 1 to 128 of A-Z a-z 0-9 . _ -"))
	}
	return p
}

// For returns the guard of a key. Upper and lower case are the same. A key that is not 1 to 128 of
// the characters A-Z a-z 0-9 . _ - is stored as its SHA-256.
func (p *PerKey) For(key string) *Pool {
	return &Pool{p.c.use(kindKey, p.name+"/"+storedKey(strings.ToLower(key)), func(g *shared) {
		g.broken = joinMistakes(p.err, g.setSpec(p.spec))
	})}
}
