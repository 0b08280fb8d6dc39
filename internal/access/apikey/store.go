package apikey

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

const (
	// MaxKeys is the most keys in Redis. Each process that checks keys has a copy of all of them.
	MaxKeys = 10_000

	// RotationOverlap is how long the old key is valid after a rotation.
	RotationOverlap = 24 * time.Hour

	expiredKept = 30 * 24 * time.Hour // for so long the record of an expired key stays for operators
	purgeBatch  = 100                 // most records that one Add changes: it also removes expired ones
	pageSize    = 1000                // records that one command reads, about
	pageTimeout = 2 * time.Second     // longest time of this command
	day         = time.DateOnly
)

var (
	// ErrNoKey says that no key has the id.
	ErrNoKey = errors.New("there is no key with this id; it may have been revoked")
	// ErrExpiredKey means that a key can't be rotated, because it has expired.
	ErrExpiredKey = errors.New("it has expired: create a new key")
	// ErrFull says that there are MaxKeys keys.
	ErrFull = fmt.Errorf("there are %d keys, and no more are allowed: revoke some", MaxKeys)
	// errChanged means that another call has changed a record since it was read. The write was
	// refused.
	errChanged = errors.New("another call has changed it at the same time: try again")
)

var changeScript = call.NewScript("change", lua.Source("auth/change"))

// Store is the keys in Redis.
type Store struct {
	c      redis.UniversalClient
	key    string
	hasher auth.Hasher
	now    func() time.Time
}

// NewStore returns the store of the keys in a key space. All processes of an installation must use
// the same Hasher. now is the clock.
func NewStore(c redis.UniversalClient, space keyspace.Space, hasher auth.Hasher, now func() time.Time) *Store {
	return &Store{c: c, key: space.AuthKeys(), hasher: hasher, now: now}
}

// Request says which key to create.
type Request struct {
	Role      auth.Role
	Tenant    string
	Payloads  *bool // nil: as the role has it
	Name      string
	CreatedBy string
	Lifetime  time.Duration // 0: the key does not expire
}

// NewKey is a key that was just created, with its token. The token is stored nowhere, so it can't
// be shown again.
type NewKey struct {
	Token string `json:"key"`
	Record
}

// stored is a record as it was read.
type stored struct {
	text string
	Record
	err error // why the record can't be used
}

// Check returns an error that has each wrong field.
func (r Request) Check() error {
	errs := []error{auth.Principal{Role: r.Role, Tenant: r.Tenant}.Check(), checkName(r.Name)}
	if r.Lifetime < 0 || r.Lifetime > maxLifetime || r.Lifetime > 0 && r.Lifetime < minLifetime {
		errs = append(errs, fmt.Errorf("expires %v: must be from 1m to 87600h, or 0 for never", r.Lifetime))
	}
	return errors.Join(errs...)
}

// New returns a new key, which is stored nowhere.
func (r Request) New(hash func(token string) auth.Hash, now time.Time) (NewKey, error) {
	if err := r.Check(); err != nil {
		return NewKey{}, err
	}
	token := auth.NewToken(r.Role)
	record := Record{
		ID: hash(token).KeyID(), Role: r.Role, Tenant: r.Tenant, Payloads: r.Role.PayloadsByDefault(), Name: r.Name,
		CreatedAt: now.UTC().Truncate(time.Second), CreatedBy: r.CreatedBy,
	}
	if r.Payloads != nil {
		record.Payloads = *r.Payloads
	}
	if r.Lifetime > 0 {
		record.ExpiresAt = record.CreatedAt.Add(r.Lifetime)
	}
	return NewKey{Token: token, Record: record}, nil
}

// Create stores a new key, as New and Add do.
func (s *Store) Create(ctx context.Context, r Request) (NewKey, error) {
	k, err := s.New(r)
	if err != nil {
		return NewKey{}, err
	}
	return k, s.Add(ctx, k)
}

// New returns a new key, which Add stores.
func (s *Store) New(r Request) (NewKey, error) {
	k, err := r.New(s.hasher.Hash, s.now())
	if err != nil {
		return NewKey{}, fmt.Errorf("create an API key: %w", err)
	}
	return k, nil
}

// Add stores a key that New has returned. After an error, the key may have been stored
// nevertheless; List shows it. Add also removes the records of keys that expired long ago.
func (s *Store) Add(ctx context.Context, k NewKey) error {
	all, err := s.read(ctx, nil)
	if err != nil {
		return fmt.Errorf("create an API key: %w", unavailable(err))
	}
	changes, err := s.add(nil, k)
	if err != nil {
		return err
	}
	old := s.now().Add(-expiredKept)
	for hash, r := range all {
		if r.err == nil && r.Expired(old) && len(changes) < purgeBatch {
			changes = append(changes, change{hash: hash, old: r.text})
		}
	}
	if err := s.apply(ctx, changes...); err != nil {
		return fmt.Errorf("create an API key: %w", unavailable(err))
	}
	return nil
}

func (s *Store) add(changes []change, k NewKey) ([]change, error) {
	text, err := k.encode()
	return append(changes, change{hash: s.hasher.Hash(k.Token), text: text}), err
}

// Asked returns the fields of the request, as the activity log shows them of a new key.
func (r Request) Asked() map[string]any {
	asked := map[string]any{"role": r.Role, "tenant": r.Tenant, "name": r.Name}
	if r.Payloads != nil {
		asked["payloads"] = *r.Payloads
	}
	if r.Lifetime > 0 {
		asked["lifetime"] = r.Lifetime.String()
	}
	return asked
}

// unavailable returns err, wrapped in api.ErrUnavailable if it means that Redis does not answer.
func unavailable(err error) error {
	if call.IsUnavailable(err) {
		return fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	}
	return err
}

// List returns all keys, the oldest first, and an error for each unusable record.
func (s *Store) List(ctx context.Context) (keys []Record, unusable []error, err error) {
	all, err := s.read(ctx, nil)
	if err != nil {
		return nil, nil, fmt.Errorf("list API keys: %w", unavailable(err))
	}
	for _, r := range all {
		if r.err != nil {
			unusable = append(unusable, r.err)
			continue
		}
		keys = append(keys, r.Record)
	}
	slices.SortFunc(keys, func(a, b Record) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	slices.SortFunc(unusable, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return keys, unusable, nil
}

// Revoke deletes a key. All processes that reach Redis refuse it within ten seconds. A second call
// returns ErrNoKey.
func (s *Store) Revoke(ctx context.Context, id string) error {
	hash, _, err := s.find(ctx, id)
	if err == nil {
		err = s.c.HDel(ctx, s.key, string(hash)).Err()
	}
	if err != nil {
		return fmt.Errorf("revoke API key %s: %w", id, unavailable(err))
	}
	return nil
}

// Rotation is what Rotate does.
type Rotation struct {
	New NewKey
	Old Record // of the key that New replaces, as it is after the rotation

	changes []change
}

// NewRotation prepares the rotation of the key with this id; Rotate stores it. The new key has the
// same rights, name and lifetime. The old key will expire after RotationOverlap, or at its own
// earlier expiry. A key can be rotated only once. NewRotation changes nothing in Redis.
func (s *Store) NewRotation(ctx context.Context, id, by string) (Rotation, error) {
	r, err := s.newRotation(ctx, id, by)
	if err != nil {
		return Rotation{}, fmt.Errorf("rotate API key %s: %w", id, unavailable(err))
	}
	return r, nil
}

func (s *Store) newRotation(ctx context.Context, id, by string) (r Rotation, err error) {
	hash, found, err := s.find(ctx, id)
	if err == nil {
		err = found.err
	}
	now := s.now()
	switch {
	case err != nil:
	case found.ReplacedBy != "":
		err = fmt.Errorf("it was rotated already: key %s replaces it", found.ReplacedBy)
	case found.Expired(now):
		err = ErrExpiredKey
	}
	if err != nil {
		return r, err
	}
	old := found.Record
	request := Request{Role: old.Role, Tenant: old.Tenant, Payloads: &old.Payloads, Name: old.Name, CreatedBy: by}
	if !old.ExpiresAt.IsZero() {
		request.Lifetime = old.ExpiresAt.Sub(old.CreatedAt)
	}
	k, err := request.New(s.hasher.Hash, now)
	if err != nil {
		return r, err
	}
	if end := k.CreatedAt.Add(RotationOverlap); old.ExpiresAt.IsZero() || end.Before(old.ExpiresAt) {
		old.ExpiresAt = end
	}
	old.ReplacedBy = k.ID
	text, err := old.encode()
	if err != nil {
		return r, err
	}
	changes, err := s.add([]change{{hash: hash, old: found.text, text: text}}, k)
	return Rotation{New: k, Old: old, changes: changes}, err
}

// Rotate stores the new key and the new expiry of the old one, both or neither. After an error,
// both may have been stored nevertheless: List shows it.
func (s *Store) Rotate(ctx context.Context, r Rotation) error {
	if err := s.apply(ctx, r.changes...); err != nil {
		return fmt.Errorf("rotate API key %s: %w", r.Old.ID, unavailable(err))
	}
	return nil
}

// markUsed stores the day of a key's last use, unless the key's record has changed since it was
// read.
func (s *Store) markUsed(ctx context.Context, hash auth.Hash, r stored, today string) error {
	record := r.Record
	record.LastUsedDay = today
	text, err := record.encode()
	if err != nil {
		return err
	}
	if err := s.apply(ctx, change{hash: hash, old: r.text, text: text}); err != nil && !errors.Is(err, errChanged) {
		return fmt.Errorf("store the last use of API key %s: %w", r.ID, err)
	}
	return nil
}

// lookUp reads the record of the key with a hash. It returns ErrNoKey if there is none, and an error
// for an unusable record.
func (s *Store) lookUp(ctx context.Context, hash auth.Hash) (stored, error) {
	text, err := s.c.HGet(ctx, s.key, string(hash)).Result()
	if errors.Is(err, redis.Nil) {
		return stored{}, ErrNoKey
	}
	if err != nil {
		return stored{}, fmt.Errorf("read an API key: %w", err)
	}
	r, err := decode(hash, text)
	return stored{text: text, Record: r}, err
}

// find returns the key with an id, even if its record is unusable.
func (s *Store) find(ctx context.Context, id string) (auth.Hash, stored, error) {
	all, err := s.read(ctx, nil)
	if err != nil {
		return "", stored{}, err
	}
	for hash, r := range all {
		if id != "" && hash.KeyID() == id {
			return hash, r, nil
		}
	}
	return "", stored{}, ErrNoKey
}

// read returns all keys. It reads them in pages, so that Redis serves others in between, and waits
// for each page up to pageTimeout. A key that exists during the whole call is in the result. known
// has keys that were read before: a record that is unchanged is not decoded again.
func (s *Store) read(ctx context.Context, known map[auth.Hash]stored) (map[auth.Hash]stored, error) {
	all := make(map[auth.Hash]stored, len(known))
	for cursor := uint64(0); ; {
		pageCtx, cancel := context.WithTimeout(ctx, pageTimeout)
		page, next, err := s.c.HScan(pageCtx, s.key, cursor, "", pageSize).Result()
		cancel()
		if err != nil {
			return nil, fmt.Errorf("read API keys: %w", err)
		}
		for i := 0; i+1 < len(page); i += 2 {
			hash, text := auth.Hash(page[i]), page[i+1]
			if r, ok := known[hash]; ok && r.text == text {
				all[hash] = r
				continue
			}
			r, err := decode(hash, text)
			all[hash] = stored{text: text, Record: r, err: err}
		}
		if len(all) > 2*MaxKeys { // only a program that is not this one can have written so many
			return nil, fmt.Errorf("read API keys: %s has more than %d records", s.key, 2*MaxKeys)
		}
		if cursor = next; cursor == 0 {
			return all, nil
		}
	}
}

// change replaces the record old of a key by text. "" as old means that there is no record, and as
// text that the record is deleted.
type change struct {
	hash      auth.Hash
	old, text string
}

// apply makes all changes atomically, or none if a record is not as expected (errChanged) or there
// would be more than MaxKeys keys (ErrFull). Repeating the call has no further effect.
func (s *Store) apply(ctx context.Context, changes ...change) error {
	args := []any{MaxKeys}
	for _, c := range changes {
		args = append(args, string(c.hash), c.old, c.text)
	}
	r := changeScript.Read(ctx, s.c, []string{s.key}, args)
	switch r.Code("DONE", "CHANGED", "FULL") {
	case "CHANGED":
		return errChanged
	case "FULL":
		return ErrFull
	}
	return r.Err()
}
