// Package session stores the sessions of the web console, which begin with a login. A session has a
// random token, which only the browser has, and a record in Redis under the hash of the token. The
// package hides how long sessions last, and that each process caches the sessions that it has read.
//
// A session does not prove that its API key is still valid: the caller must check that by package
// apikey.
package session

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

const (
	// Lifetime is how long a session lasts at most.
	Lifetime = 12 * time.Hour
	// Idle is how long a session lasts without a request.
	Idle = time.Hour
	// Fresh is how long a process uses its cached copy of a session without reading Redis. So long
	// a session that was ended at another process may still work here; up to 15 minutes while Redis
	// is away.
	Fresh = 5 * time.Second

	outage      = 15 * time.Minute // for so long a session that was read before works while Redis is away
	touchPause  = time.Minute      // least time between two writes of a session's last request
	tokenBytes  = 32
	tokenChars  = 43     // of tokenBytes in base64
	maxSessions = 10_000 // most sessions that a process caches
)

var (
	// ErrNone means that there is no valid session: it was ended or has expired, or its record was
	// changed or can't be read.
	ErrNone = errors.New("there is no such session")
	// ErrUnavailable means that it is not known whether the session exists, because Redis is away.
	ErrUnavailable = errors.New("sessions can't be checked now, because Redis is not available: try again")
)

// Store has the sessions of an installation. It is safe for concurrent use.
type Store struct {
	redis  redis.Cmdable
	space  keyspace.Space
	hasher auth.Hasher
	now    func() time.Time

	known *redisx.Cache[auth.Hash, known]
}

// record is what Redis has of a session.
type record struct {
	Key       string    `json:"key"`
	Role      auth.Role `json:"role"`
	Tenant    string    `json:"tenant,omitempty"`
	Payloads  bool      `json:"payloads"`
	CreatedAt time.Time `json:"created_at"`
	SeenAt    time.Time `json:"seen_at"` // the last request, to the minute
	Seal      auth.Hash `json:"seal"`    // see seal
}

// known is a session as this process has read it.
type known struct {
	record
	readAt time.Time
}

// New returns the store of the sessions in this Redis. All processes of an installation must use
// the same Hasher. If it has a pepper, a program that can write to Redis can't make a session. now
// is the clock.
func New(c redis.Cmdable, space keyspace.Space, hasher auth.Hasher, now func() time.Time) *Store {
	cached := redisx.NewCache[auth.Hash, known](Idle, maxSessions)
	cached.Now = now
	return &Store{redis: c, space: space, hasher: hasher, now: now, known: cached}
}

// seal returns a hash over a session's token and its record, without the time of the last request.
// It is stored in the record. If the keys have a pepper, a program that can write to Redis can't
// give a session the rights of another key; without a pepper, it can if it knows the session's
// token.
func (s *Store) seal(token string, r record) (auth.Hash, error) {
	r.SeenAt, r.Seal = time.Time{}, ""
	text, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("encode a session: %w", err)
	}
	return s.hasher.Hash(token + " " + string(text)), nil
}

// Create begins a session of a principal, and returns its token. After an error, the session may
// exist, but nobody has its token.
func (s *Store) Create(ctx context.Context, p auth.Principal) (token string, err error) {
	var random [tokenBytes]byte
	_, _ = rand.Read(random[:]) // it never fails
	token = base64.RawURLEncoding.EncodeToString(random[:])
	now := s.now().UTC().Truncate(time.Millisecond)
	r := record{Key: p.KeyID, Role: p.Role, Tenant: p.Tenant, Payloads: p.Payloads, CreatedAt: now, SeenAt: now}
	if r.Seal, err = s.seal(token, r); err != nil {
		return "", err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("encode a session: %w", err)
	}
	hash := s.hasher.Hash(token)
	if err := s.redis.Set(ctx, keyspace.AuthSession(s.space.Prefix(), string(hash)), text, Lifetime).Err(); err != nil {
		return "", failed("begin a session", err)
	}
	s.known.Put(hash, known{r, s.now()})
	return token, nil
}

// Find returns the principal of a session. request says that a user's request asks: that keeps the
// session alive for about an hour more, up to Lifetime. Reads without a user's act, such as those
// of an open event stream, do not. The error is ErrNone, ErrUnavailable, or an unexpected one.
func (s *Store) Find(ctx context.Context, token string, request bool) (auth.Principal, error) {
	if len(token) != tokenChars {
		return auth.Principal{}, ErrNone
	}
	hash, now := s.hasher.Hash(token), s.now()
	k, _, remembered := s.known.Get(hash)
	if !remembered || now.Sub(k.readAt) > Fresh {
		r, err := s.read(ctx, hash, token)
		switch {
		case errors.Is(err, ErrUnavailable) && remembered && now.Sub(k.readAt) <= outage:
		case errors.Is(err, ErrNone):
			s.known.Delete(hash)
			return auth.Principal{}, err
		case err != nil: // such as a request that its client has left
			return auth.Principal{}, err
		default:
			k = known{r, now}
			s.known.Put(hash, k)
		}
	}
	if now.Sub(k.CreatedAt) >= Lifetime || now.Sub(k.SeenAt) >= Idle {
		s.known.Delete(hash)
		return auth.Principal{}, ErrNone
	}
	if request && now.Sub(k.SeenAt) >= touchPause {
		s.touch(ctx, hash, k)
	}
	return auth.Principal{KeyID: k.Key, Role: k.Role, Tenant: k.Tenant, Payloads: k.Payloads}, nil
}

// touch stores the time of the latest request in the session's record. It uses XX, so that it does
// not create the record of an ended session again. If the write fails, a later request repeats it.
func (s *Store) touch(ctx context.Context, hash auth.Hash, k known) {
	k.SeenAt = s.now().UTC().Truncate(time.Millisecond)
	text, err := json.Marshal(k.record)
	if err != nil {
		return
	}
	key := keyspace.AuthSession(s.space.Prefix(), string(hash))
	err = s.redis.SetArgs(ctx, key, text, redis.SetArgs{Mode: "XX", KeepTTL: true}).Err()
	if errors.Is(err, redis.Nil) {
		s.known.Delete(hash)
		return
	}
	s.known.Put(hash, k)
}

func (s *Store) read(ctx context.Context, hash auth.Hash, token string) (r record, err error) {
	text, err := s.redis.Get(ctx, keyspace.AuthSession(s.space.Prefix(), string(hash))).Bytes()
	switch {
	case errors.Is(err, redis.Nil):
		return r, ErrNone
	case err != nil:
		return r, failed("read a session", err)
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%w: its record can't be read", ErrNone)
	}
	if seal, err := s.seal(token, r); err != nil || seal != r.Seal {
		return r, fmt.Errorf("%w: its record was changed", ErrNone)
	}
	return r, nil
}

// End ends a session. This process refuses it at once, others within Fresh. After an error, the
// session may go on.
func (s *Store) End(ctx context.Context, token string) error {
	hash := s.hasher.Hash(token)
	s.known.Delete(hash)
	if err := s.redis.Del(ctx, keyspace.AuthSession(s.space.Prefix(), string(hash))).Err(); err != nil {
		return failed("end a session", err)
	}
	return nil
}

// FirstUse reports whether a form with this name is sent for the first time within an hour, to any
// process. After an error, the form may count as sent.
func (s *Store) FirstUse(ctx context.Context, form string) (first bool, err error) {
	// The name has a space, which no token has, so that the record of a form can't be taken for a
	// session.
	key := keyspace.AuthSession(s.space.Prefix(), string(auth.SHA256("form "+form)))
	if first, err = s.redis.SetNX(ctx, key, "form", Idle).Result(); err != nil {
		return false, failed("store that a form was sent", err)
	}
	return first, nil
}

func failed(what string, err error) error {
	if call.IsUnavailable(err) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w: %w", what, ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
