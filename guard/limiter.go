package guard

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Limiter is a rate limit for any number of keys. The permits that a process took stay spent when
// it dies. When Redis's clock steps back, limits go on at normal speed; a step forward admits at
// most the burst, or the permits of a window, at once. FLUSHALL gives all permits back. When Redis
// is away, calls are allowed unless the option OnOutage says otherwise.
type Limiter struct {
	c      *Client
	name   string
	rate   Rate
	outage Outage
	broken error
	g      *shared // its circuit, its metric label, and the key where it is registered

	registerAt atomic.Int64 // Unix time in ns from which the next call registers it

	localRate Rate
	mu        sync.Mutex
	locally   map[string]*rate.Limiter // by key, while Redis is away; nil unless the outage is Local
}

// LimiterOption is an option of Limiter.
type LimiterOption interface{ toLimiter(*Limiter) }

// OutageOption is an option of Limiter and of Breaker.
type OutageOption struct{ outage Outage }

// OnOutage sets what calls of a Limiter or Breaker do when Redis is away. By default they are
// allowed.
func OnOutage(o Outage) OutageOption { return OutageOption{o} }

func (o OutageOption) toLimiter(l *Limiter) { l.outage = o.outage }
func (o OutageOption) toBreaker(s *Spec)    { s.OnOutage = o.outage }

// Limiter returns a limiter. Each key has the limit r of its own. A mistake in the name, in r or in
// an option is an error of each Take.
func (c *Client) Limiter(name string, r Rate, o ...LimiterOption) *Limiter {
	l := &Limiter{c: c, name: name, rate: r, outage: Open, g: newShared(c, kindLimiter, name)}
	l.g.label = c.meter.label(name)
	for _, option := range o {
		option.toLimiter(l)
	}
	errs := checkRate("rate", r)
	if r == (Rate{}) {
		errs = append(errs, invalid("rate: permits 0: must be 1 to 1000000000"))
	}
	errs = append(errs, checkName(name))
	local, isLocal := l.outage.localRate()
	switch {
	case isLocal && local == (Rate{}):
		errs = append(errs, invalid("on outage: rate: permits 0: must be 1 to 1000000000"))
	case isLocal:
		errs = append(errs, checkRate("on outage", local)...)
		l.localRate, l.locally = local, map[string]*rate.Limiter{}
	case l.outage != Closed && l.outage != Open:
		errs = append(errs, invalid("on outage %.40q: must be Closed, Open or Local", string(l.outage)))
	}
	if err := joinMistakes(errs...); err != nil {
		l.broken = fmt.Errorf("limiter %s: %w", name, err)
	}
	return l
}

// Decision is the answer of a limiter.
type Decision struct {
	Allowed    bool
	Left       int           // permits that are left; 0 when Redis is away and the limiter is Open
	RetryAfter time.Duration // until the same call can be allowed, rounded up to µs; 0 if it was
	ResetAfter time.Duration // until all permits are there again; 0 without an answer of Redis
	At         time.Time     // Redis's time, without its steps back; without an answer of Redis, this process's
}

// Take takes n permits of a key, all or none. A denial is no error: see Decision.Allowed. A key
// that is not 1 to 128 of the characters A-Z a-z 0-9 . _ - is stored as its SHA-256.
//
// If a reply is lost, go-redis repeats the call, which then takes its permits twice: the limit
// holds, and n permits are wasted.
//
// Errors: ErrTooManyTokens when n is more than the limit can ever allow, or while Redis is away the
// limit of the process; ErrInvalid when n is less than 1 or the limiter has a mistake; the error of
// ctx when ctx ends before Redis has answered; ErrUnavailable when Redis is away and the limiter is
// Closed; ErrClosed; and ErrSetup.
func (l *Limiter) Take(ctx context.Context, key string, n int) (Decision, error) {
	switch {
	case l.broken != nil:
		return Decision{}, l.broken
	case n < 1:
		return Decision{}, fmt.Errorf("limiter %s: %w", l.name, invalid("tokens %d: must be at least 1", n))
	case n > l.rate.most():
		return Decision{}, fmt.Errorf("limiter %s: %d tokens, at most %d can be taken at once: %w",
			l.name, n, l.rate.most(), ErrTooManyTokens)
	}
	began := time.Now()
	d, err := l.take(ctx, storedKey(key), n)
	if errors.Is(err, ErrUnavailable) {
		switch {
		case l.outage == Open:
			l.c.meter.unavailable(l.g)
			return Decision{Allowed: true, At: time.Now()}, nil
		case l.locally != nil:
			l.c.meter.unavailable(l.g)
			return l.takeLocally(key, n)
		}
	}
	l.c.meter.took(l.g, time.Since(began), d, err)
	return d, err
}

func (l *Limiter) take(ctx context.Context, key string, n int) (Decision, error) {
	if l.c.isClosed() {
		return Decision{}, fmt.Errorf("limiter %s: %w", l.name, ErrClosed)
	}
	if err := l.c.check(ctx, false); err != nil {
		return Decision{}, fmt.Errorf("limiter %s: %w", l.name, err)
	}
	if !l.g.circuit.allow() {
		return Decision{}, fmt.Errorf("limiter %s: %w", l.name, errNotSent)
	}
	began := time.Now()
	reply, err := l.c.pipelined(ctx, takeScript, []string{keyspace.Limiter(l.c.cfg.prefix, l.name, key)},
		[]any{n, l.rate.kindName(), l.rate.Permits, l.rate.Window.Milliseconds(), l.rate.burst()})
	if err := l.g.judge(ctx, err, began); err != nil {
		return Decision{}, err
	}
	r := takeScript.Reply(reply)
	d := Decision{Allowed: r.Flag(), Left: int(r.Number())}
	d.RetryAfter = time.Duration(r.Number()) * time.Microsecond
	d.ResetAfter = time.Duration(r.Number()) * time.Microsecond
	d.At = time.UnixMicro(r.Number())
	l.register(ctx)
	return call.Done(r, d)
}

// A limiter is registered for registeredFor, and again when half of that has passed.
const registeredFor = time.Hour

// register stores the limit as that of a guard without members, so that List and Inspect find it
// until an hour after its last use. A call of Take in half an hour does this, so it costs nothing.
// If it fails, only operators miss something, and a call half a minute later tries again.
func (l *Limiter) register(ctx context.Context) {
	now := time.Now()
	at := l.registerAt.Load()
	if now.UnixNano() < at || !l.registerAt.CompareAndSwap(at, now.Add(registeredFor/2).UnixNano()) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	key := l.g.keys[0] + "guard" // of the same form as that of other guards
	_, err := l.c.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.HSet(ctx, key, "spec", Spec{Rate: l.rate}.pack(registeredFor))
		p.PExpire(ctx, key, registeredFor)
		return nil
	})
	if err != nil {
		l.registerAt.Store(now.Add(30 * time.Second).UnixNano())
		l.c.cfg.logger.Debug("guard: a limiter could not be registered", "guard", l.name, "error", err)
	}
}

// storedKey returns a key as it is stored: itself, or its SHA-256 in hex if it is no valid id.
func storedKey(key string) string {
	if validID(key) {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// takeLocally takes permits of the limit that this process itself keeps for a key.
func (l *Limiter) takeLocally(key string, n int) (Decision, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	local := l.locally[key]
	if local == nil {
		if len(l.locally) >= mostLocalKeys {
			clear(l.locally) // they begin full again; Redis is away, so no limit is exact now
		}
		local = rate.NewLimiter(rate.Limit(l.localRate.perSecond()), l.localRate.most())
		l.locally[key] = local
	}
	now := time.Now()
	r := local.ReserveN(now, n)
	if !r.OK() {
		return Decision{At: now}, fmt.Errorf("limiter %s: %d tokens, at most %d while Redis is away: %w",
			l.name, n, l.localRate.most(), ErrTooManyTokens)
	}
	if wait := r.DelayFrom(now); wait > 0 {
		r.CancelAt(now)
		return Decision{RetryAfter: wait, At: now}, nil
	}
	return Decision{Allowed: true, Left: int(local.TokensAt(now)), At: now}, nil
}

// mostLocalKeys is for how many keys a limiter with the policy Local keeps limits in memory while
// Redis is away. One more key makes it forget all of them, and they begin with all permits again.
const mostLocalKeys = 10_000
