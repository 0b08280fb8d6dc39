// Package apikey checks API keys, and stores them in Redis or reads them from a file. It hides that
// each process has a copy of all keys. An unknown token, or a copy older than ten seconds, makes
// the process read Redis, at most once a second. All processes refuse a revoked key within ten
// seconds, but a process that can't reach Redis uses its copy for up to 15 minutes.
package apikey

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

const (
	// copyTTL is how long the copy of the keys is valid while Redis can be read. It bounds the time
	// until a revocation takes effect.
	copyTTL = 10 * time.Second
	// OutageTTL is how long the copy is valid while Redis is away. Nobody can revoke a key
	// meanwhile, unless only this process does not reach Redis: then it can't change anything in
	// Redis either.
	OutageTTL = 15 * time.Minute

	interval  = 5 * time.Second // pause between two calls of Step
	readPause = time.Second     // least time between two reads that requests cause
	usedBatch = 100             // keys whose last use one Step stores
)

var (
	// ErrInvalid says that the token does not belong to a valid key. The answer is 401.
	ErrInvalid = errors.New("the API key is not valid")
	// ErrUnavailable says that nobody can tell now whether the key is valid, because Redis is away.
	// The answer is 503.
	ErrUnavailable = errors.New("API keys can't be checked now, because Redis is not available: try again")
	// errSlow says that Redis answers, but that reading all keys takes longer than a copy is valid.
	errSlow = fmt.Errorf("read API keys: not all are read after %v, although Redis answers", copyTTL)
)

// Options has the parts of an Authenticator.
type Options struct {
	Store *Store // nil: there are only keys of the file
	File  *File  // nil: there are only keys in Redis
	Log   *slog.Logger
	Now   func() time.Time // the clock
}

// Authenticator checks keys. It is safe for concurrent use. A loop has to call Step, which keeps
// the copy of the keys fresh; between late calls, requests read the keys when the copy is too old.
type Authenticator struct {
	store    *Store
	file     *File
	log      *slog.Logger
	now      func() time.Time
	failures *failures

	reading sync.Mutex // held while the keys are read from Redis; before mu

	mu   sync.Mutex // guards the fields below
	copy copied
	used map[auth.Hash]bool // keys of the copy that were used today, but whose record does not say so
}

// copied is the keys of Redis as they were read last.
type copied struct {
	keys   map[auth.Hash]stored // never changed
	hashes map[string]auth.Hash // by the id of the key; never changed
	readAt time.Time            // when the read of keys began; zero: they were never read

	triedAt time.Time // when the last attempt to read ended
	err     error     // of the last attempt
}

// outage reports whether the last attempt to read the keys failed because Redis is away. Another
// error, such as a missing right, does not extend the use of the copy, because keys can be revoked
// meanwhile.
func (c copied) outage() bool { return call.IsUnavailable(c.err) }

func (c copied) usable(now time.Time) bool {
	ttl := copyTTL
	if c.outage() {
		ttl = OutageTTL
	}
	return !c.readAt.IsZero() && now.Sub(c.readAt) <= ttl
}

// New returns an Authenticator that has read no key from Redis yet.
func New(o Options) *Authenticator {
	return &Authenticator{
		store: o.Store, file: o.File, log: o.Log, now: o.Now, failures: newFailures(), used: map[auth.Hash]bool{},
	}
}

// Authenticate returns the principal of a token. client is the result of
// clientaddr.Proxies.ClientOf. The error is ErrInvalid, ErrUnavailable or a *TooManyFailuresError.
//
// An unknown token makes the process read all keys, at most once a second, because its key may be
// new. So a new key works within a second, and any number of wrong tokens causes one read a second.
func (a *Authenticator) Authenticate(ctx context.Context, token string, client netip.Addr) (auth.Principal, error) {
	role, err := auth.ParseToken(token)
	if err != nil {
		return auth.Principal{}, a.failures.failed(client, a.now(), fmt.Errorf("%w: %w", ErrInvalid, err))
	}
	p, err := a.find(ctx, token)
	if err == nil && p.Role != role {
		// The hash says nothing of the record, so a program that can write to Redis could have
		// given the key another role.
		err = fmt.Errorf("%w: it is a key of another role", ErrInvalid)
	}
	switch {
	case errors.Is(err, ErrInvalid):
		return auth.Principal{}, a.failures.failed(client, a.now(), err)
	case err != nil:
		return auth.Principal{}, err
	}
	return p, nil
}

// find returns the principal of a token of the right form.
func (a *Authenticator) find(ctx context.Context, token string) (auth.Principal, error) {
	if a.file != nil {
		if p, ok := a.file.find(auth.SHA256(token)); ok {
			return p, nil
		}
	}
	if a.store == nil {
		return auth.Principal{}, ErrInvalid
	}
	hash := a.store.hasher.Hash(token)
	c, now := a.current(), a.now()
	if _, known := c.keys[hash]; !known || now.Sub(c.readAt) > copyTTL {
		// during an outage, known keys don't wait for the attempt of another request
		c = a.refresh(ctx, !known || !c.usable(now))
		now = a.now()
	}
	r, err := c.find(hash, now)
	if err != nil {
		return auth.Principal{}, err
	}
	if r.LastUsedDay < dayOf(now) {
		a.mu.Lock()
		a.used[hash] = true
		a.mu.Unlock()
	}
	return r.principal(), nil
}

// Still reports whether a principal that Authenticate has returned is valid, so that a long answer
// can end when its key is revoked, expires or may do less. It asks nobody.
func (a *Authenticator) Still(p auth.Principal) bool {
	if a.file != nil && a.file.has(p) {
		return true
	}
	if a.store == nil {
		return false
	}
	c := a.current()
	r, err := c.find(c.hashes[p.KeyID], a.now())
	return err == nil && r.principal() == p
}

func (a *Authenticator) current() copied {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.copy
}

// refresh reads the keys from Redis, unless an attempt to do so has ended less than readPause ago.
// If another goroutine is reading them, refresh waits for it if wait is set, and returns the
// present copy otherwise.
func (a *Authenticator) refresh(ctx context.Context, wait bool) copied {
	if wait {
		a.reading.Lock()
	} else if !a.reading.TryLock() {
		return a.current()
	}
	defer a.reading.Unlock()
	if c := a.current(); !c.triedAt.IsZero() && a.now().Sub(c.triedAt) < readPause {
		return c
	}
	return a.read(ctx)
}

// read reads the keys from Redis. The caller holds a.reading. The end of ctx does not end the read,
// because other requests wait for it. A Redis that is slow is not taken for one that is away,
// because keys can be revoked in it.
func (a *Authenticator) read(ctx context.Context) copied {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), copyTTL)
	defer cancel()
	began := a.now()
	before := a.current()
	keys, err := a.store.read(ctx, before.keys)
	if err != nil && ctx.Err() != nil {
		err = errSlow
	}
	next := before
	if next.err = err; err == nil {
		next.keys, next.hashes, next.readAt = keys, map[string]auth.Hash{}, began
		for hash, r := range keys {
			if next.hashes[r.ID] = hash; r.err != nil && before.keys[hash].err == nil {
				a.log.Error("an API key is refused", "error", r.err)
			}
		}
	}
	next.triedAt = a.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.copy = next
	return next
}

// find returns the valid key with a hash.
func (c copied) find(hash auth.Hash, now time.Time) (stored, error) {
	r, known := c.keys[hash]
	switch {
	case !c.usable(now) || !known && c.err != nil:
		return stored{}, ErrUnavailable
	case !known:
		return stored{}, ErrInvalid
	case r.err != nil:
		return stored{}, fmt.Errorf("%w: the server can't read its record", ErrInvalid)
	case r.Expired(now):
		return stored{}, fmt.Errorf("%w: it has expired", ErrInvalid)
	}
	return r, nil
}

// Step reads the keys again, and stores which keys were used on a day for the first time. A loop
// calls it; idle is the pause before the next call, which begins interval after this one. So the
// copy does not become too old although each read takes long. A file of keys with a mistake is
// logged once.
func (a *Authenticator) Step(ctx context.Context) (idle time.Duration, err error) {
	if a.file != nil {
		switch changed, err := a.file.Reload(); {
		case err != nil:
			a.log.ErrorContext(ctx, "the file of API keys can't be used, the keys read before stay valid", "error", err)
		case changed:
			a.log.InfoContext(ctx, "the file of API keys has changed and is in use")
		}
	}
	if a.store == nil {
		return interval, nil
	}
	began := a.now()
	a.reading.Lock()
	c := a.read(ctx)
	a.reading.Unlock()
	idle = max(0, interval-a.now().Sub(began))
	if c.err != nil {
		return idle, c.err
	}
	return idle, a.storeUses(ctx, c)
}

// storeUses stores the last use of keys that were used today. When Redis's memory is full, it
// stores nothing, because other writes matter more.
func (a *Authenticator) storeUses(ctx context.Context, c copied) error {
	today := dayOf(a.now())
	for _, hash := range a.someUsed() {
		if r, known := c.keys[hash]; known && r.err == nil && r.LastUsedDay < today {
			switch err := a.store.markUsed(ctx, hash, r, today); {
			case call.IsOOM(err):
				return nil
			case err != nil:
				return err
			}
		}
		a.mu.Lock()
		delete(a.used, hash)
		a.mu.Unlock()
	}
	return nil
}

func (a *Authenticator) someUsed() []auth.Hash {
	a.mu.Lock()
	defer a.mu.Unlock()
	var some []auth.Hash
	for hash := range a.used {
		if some = append(some, hash); len(some) == usedBatch {
			break
		}
	}
	return some
}

func dayOf(t time.Time) string { return t.UTC().Format(day) }
