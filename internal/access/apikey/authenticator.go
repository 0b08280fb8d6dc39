// Package apikey checks API keys. It stores them in Redis, reads them from a file, or both. It
// hides that each process has a copy of all keys. Besides a loop that reads them every 5 s, a
// request reads them if its token is unknown or the copy is older than ten seconds, at most once a
// second. So a revoked key is refused everywhere within ten seconds; but a process that can't reach
// Redis uses its copy for up to 15 minutes.
package apikey

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

const (
	// copyTTL is how long the copy of the keys is valid while Redis can be read. It bounds the time
	// until a revocation takes effect.
	copyTTL = 10 * time.Second
	// OutageTTL is how long the copy of the keys is valid while Redis is away. No key can be
	// revoked during an outage. If only this process can't reach Redis, a key that was revoked
	// meanwhile can't change anything in Redis through it.
	OutageTTL = 15 * time.Minute

	interval  = 5 * time.Second // from the beginning of a call of Step to that of the next one
	readPause = time.Second     // least time between two reads that requests cause
	usedBatch = 100             // most keys whose last use one Step stores
)

var (
	// ErrInvalid means that the token is not that of a valid key. The API answers 401.
	ErrInvalid = errors.New("the API key is not valid")
	// ErrExpired is an ErrInvalid: the key has expired.
	ErrExpired = fmt.Errorf("%w: it has expired", ErrInvalid)
	errUnknown = fmt.Errorf("%w", ErrInvalid) // no key in Redis has this hash
	// ErrUnavailable means that it is not known whether the key is valid, because the keys can't be
	// read from Redis, as while it is away. The API answers 503.
	ErrUnavailable = errors.New("API keys can't be checked now, because Redis is not available: try again")
	// errSlow means that Redis answers, but reading all keys takes longer than a copy is valid.
	errSlow = fmt.Errorf("read API keys: not all are read after %v, although Redis answers", copyTTL)
)

// Options has the parts of an Authenticator.
type Options struct {
	Store *Store // nil: there are only keys of the file
	File  *File  // nil: there are only keys in Redis
	Log   *slog.Logger
	Now   func() time.Time // the clock
}

// Authenticator checks API keys. It is safe for concurrent use. A loop has to call Step, which
// keeps the copy of the keys up to date; if it is late, a request that finds the copy too old reads
// the keys itself.
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

// outage reports whether the last read of the keys failed because Redis is away. After another
// error, such as a missing right, the copy is not used longer than usual, because keys can be
// revoked meanwhile.
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
// auth.Proxies.ClientOf. The error is ErrInvalid, ErrUnavailable or a *TooManyFailuresError.
//
// An unknown token of the right form makes the process read all keys, at most once a second,
// because its key may be new. In between, the token's record alone is read, as often as the limits
// of failed authentications allow. So a new key works at once, and any number of wrong tokens causes
// at most one read of all keys a second, and a bounded number of reads of one.
func (a *Authenticator) Authenticate(ctx context.Context, token string, client netip.Addr) (auth.Principal, error) {
	role, err := auth.ParseToken(token)
	if err != nil {
		return auth.Principal{}, a.failures.failed(client, a.now(), fmt.Errorf("%w: %w", ErrInvalid, err))
	}
	began := a.now()
	p, err := a.find(ctx, token)
	counted := false
	if errors.Is(err, errUnknown) && a.current().readAt.Before(began) { // the key may be newer than the copy
		if err = a.failures.failed(client, a.now(), err); errors.Is(err, errUnknown) {
			counted = true
			p, err = a.findNew(ctx, token, err)
		}
	}
	if err == nil && p.Role != role {
		// The token names its role, and so does the record in Redis. They differ if another program
		// has changed the role in the record: the hash of a token does not protect its record.
		err = fmt.Errorf("%w: it is a key of another role", ErrInvalid)
	}
	switch {
	case errors.Is(err, ErrInvalid) && !counted:
		return auth.Principal{}, a.failures.failed(client, a.now(), err)
	case err != nil:
		return auth.Principal{}, err
	}
	return p, nil
}

// findNew reads the record of a token's key from Redis. If there is one, it adds the key to the copy;
// otherwise it returns unknown.
func (a *Authenticator) findNew(ctx context.Context, token string, unknown error) (auth.Principal, error) {
	hash := a.store.hasher.Hash(token)
	r, err := a.store.lookUp(ctx, hash)
	switch {
	case call.IsUnavailable(err):
		return auth.Principal{}, ErrUnavailable
	case err != nil: // logged by the next read of all keys, if the record is unusable
		return auth.Principal{}, unknown
	}
	a.mu.Lock()
	a.copy.keys, a.copy.hashes = maps.Clone(a.copy.keys), maps.Clone(a.copy.hashes)
	a.copy.keys[hash], a.copy.hashes[r.ID] = r, hash
	a.mu.Unlock()
	return a.find(ctx, token)
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
		// If the key is known and the copy still usable, as during an outage, don't wait for a read
		// that another request has started.
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

// Still reports whether a principal that Authenticate returned earlier is still valid, so that a
// long answer can end when its key is revoked, expires or loses rights. It uses the process's copy
// of the keys and does not call Redis; if the copy is too old, it returns false.
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

// refresh reads the keys from Redis, unless the last read ended less than readPause ago. If another
// goroutine is reading them, refresh waits for it if wait is set; otherwise it returns the present
// copy.
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
// because other requests wait for its result. A Redis that is only slow does not count as away,
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

// find returns the valid key with a hash. The error is ErrInvalid or ErrUnavailable.
func (c copied) find(hash auth.Hash, now time.Time) (stored, error) {
	r, known := c.keys[hash]
	switch {
	case !c.usable(now) || !known && c.err != nil:
		return stored{}, ErrUnavailable
	case !known:
		return stored{}, errUnknown
	case r.err != nil:
		return stored{}, fmt.Errorf("%w: the server can't read its record", ErrInvalid)
	case r.Expired(now):
		return stored{}, ErrExpired
	}
	return r, nil
}

// Step reads the keys again, and stores which keys were used today for the first time. A loop calls
// it. idle is the wait before the next call: 0 if this call has taken interval or longer, otherwise
// the rest of interval, so the copy stays fresh even if reading takes long. A mistake in the file
// of keys is logged once.
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

// storeUses stores in Redis the last use of the keys that were used today. When Redis's memory is
// full, it skips that, because other writes matter more.
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

// The limits of failed authentications.
const (
	failuresPerMinute = 10     // of one client
	failuresBurst     = 20     // of one client
	failuresInAll     = 200    // a second, and at once, of all clients
	limitedClients    = 10_000 // most clients that are counted at a time
)

// TooManyFailuresError says that a client, or all clients together, have failed to authenticate too
// often.
type TooManyFailuresError struct {
	RetryAfter time.Duration // until another failure is answered as such
}

func (e *TooManyFailuresError) Error() string {
	return fmt.Sprintf("too many failed authentications: try again in %d s", (e.RetryAfter+time.Second-1)/time.Second)
}

// failures limits how many failed authentications a client may have, and all clients together.
// Above a limit, a failure returns a *TooManyFailuresError. A valid key is never limited, so that a
// client can't lock out another one at the same address. The limits do not reduce the reads of
// Redis.
type failures struct {
	clients *auth.Limiters
	all     *rate.Limiter
}

func newFailures() *failures {
	return &failures{
		clients: auth.NewLimiters(failuresPerMinute/60.0, failuresBurst, limitedClients),
		all:     rate.NewLimiter(failuresInAll, failuresInAll),
	}
}

// failed counts a failed authentication of a client. It returns cause, or a *TooManyFailuresError
// above a limit. client is the result of auth.Proxies.ClientOf.
func (f *failures) failed(client netip.Addr, now time.Time, cause error) error {
	wait := f.clients.Take(client, now)
	if wait == 0 {
		wait = auth.TakeFrom(f.all, now)
	}
	if wait > 0 {
		return &TooManyFailuresError{RetryAfter: wait}
	}
	return cause
}
