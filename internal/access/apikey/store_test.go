package apikey

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestWhatIsStored: the test fixes what Redis stores, because other versions read it: the name of
// the hash, its fields, and the fields of a record.
func TestWhatIsStored(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Producer, Tenant: "acme", Name: "shop <1>", CreatedBy: "cli:ann", Lifetime: 720 * time.Hour})
		require.Regexp(w, regexp.MustCompile(auth.TokenPattern), k.Token)
		stored := w.cmd.HGetAll(w.Context(), w.space.Prefix()+"auth:keys").Val()
		hash := auth.SHA256(k.Token)
		require.Equal(w, map[string]string{
			string(hash): `{"id":"` + hash.KeyID() + `","role":"producer","tenant":"acme","payloads":true,"name":"shop <1>",` +
				`"created_at":"2026-11-25T23:59:00Z","created_by":"cli:ann","expires_at":"2026-12-25T23:59:00Z","last_used_day":""}`,
		}, stored)
		require.NotContains(w, stored[string(hash)], k.Token[4:34])
		require.Equal(w, []Record{k.Record}, w.list())

		k2 := w.create(Request{Role: auth.Reader})
		require.Equal(w, `{"id":"`+k2.ID+`","role":"reader","tenant":"","payloads":false,"name":"",`+
			`"created_at":"2026-11-25T23:59:00Z","created_by":"","last_used_day":""}`,
			w.cmd.HGet(w.Context(), w.space.AuthKeys(), string(auth.SHA256(k2.Token))).Val())
	})
}

func TestCreateRefusesBadValues(t *testing.T) {
	both(t, func(w *world) {
		for want, r := range map[string]Request{
			`role "root": must be one of admin, `:              {Role: "root"},
			"tenant: a producer needs one":                     {Role: auth.Producer},
			`tenant "a b": must match ^[A-Za-z0-9._-]{1,128}$`: {Role: auth.Producer, Tenant: "a b"},
			"tenant *: only a producer":                        {Role: auth.Reader, Tenant: "*"},
			`tenant "acme": a key of role admin has none`:      {Role: auth.Admin, Tenant: "acme"},
			"name: must be at most 128 printable characters":   {Role: auth.Admin, Name: strings.Repeat("ä", 129)},
			"name: must be at most 128 printable":              {Role: auth.Admin, Name: "a\x1b[2J"},
			"expires 59s: must be from 1m to 87600h":           {Role: auth.Admin, Lifetime: 59 * time.Second},
			"expires -1s: must be from 1m":                     {Role: auth.Admin, Lifetime: -time.Second},
			"expires 87600h0m1s: must be from 1m to 87600h":    {Role: auth.Admin, Lifetime: 87600*time.Hour + time.Second},
		} {
			_, err := w.store.Create(w.Context(), r)
			require.ErrorContains(w, err, want)
		}
		require.Empty(w, w.list())
		w.create(Request{Role: auth.Admin, Name: strings.Repeat("ä", 128), Lifetime: time.Minute})
	})
}

func TestRevoke(t *testing.T) {
	both(t, func(w *world) {
		a, b := w.create(Request{Role: auth.Admin}), w.create(Request{Role: auth.Operator})
		require.NoError(w, w.store.Revoke(w.Context(), a.ID))
		require.ErrorIs(w, w.store.Revoke(w.Context(), a.ID), ErrNoKey)
		require.ErrorIs(w, w.store.Revoke(w.Context(), ""), ErrNoKey)
		require.Equal(w, []Record{b.Record}, w.list())
	})
}

// rotate prepares a rotation, and carries it out.
func (w *world) rotate(id, by string) (NewKey, Record, error) {
	r, err := w.store.NewRotation(w.Context(), id, by)
	if err != nil {
		return NewKey{}, Record{}, err
	}
	return r.New, r.Old, w.store.Rotate(w.Context(), r)
}

func TestRotate(t *testing.T) {
	both(t, func(w *world) {
		no := false
		old := w.create(Request{Role: auth.Producer, Tenant: "acme", Name: "shop", Payloads: &no, CreatedBy: "cli:ann"})
		w.pass(time.Hour)
		k, replaced, err := w.rotate(old.ID, "cli:bob")
		require.NoError(w, err)
		want := old.Record
		want.ExpiresAt, want.ReplacedBy = w.now().Add(24*time.Hour), k.ID
		require.Equal(w, want, replaced)
		require.Equal(w, Record{
			ID: k.ID, Role: auth.Producer, Tenant: "acme", Name: "shop", CreatedAt: w.now(), CreatedBy: "cli:bob",
		}, k.Record)
		require.Equal(w, []Record{replaced, k.Record}, w.list())
		require.NotEqual(w, old.Token, k.Token)

		// A second rotation of the same key is refused: the error names the key that replaces it,
		// and no third key is made.
		_, _, err = w.rotate(old.ID, "cli:bob")
		require.ErrorContains(w, err, "it was rotated already: key "+k.ID+" replaces it")
		require.Len(w, w.list(), 2)
		_, _, err = w.rotate("key_nosuch", "cli:bob")
		require.ErrorIs(w, err, ErrNoKey)

		// The new key of a key with a lifetime has the same lifetime, and a rotation never extends
		// the life of the old key.
		short := w.create(Request{Role: auth.Reader, Lifetime: 48 * time.Hour})
		w.pass(47 * time.Hour)
		k, replaced, err = w.rotate(short.ID, "")
		require.NoError(w, err)
		require.Equal(w, short.ExpiresAt, replaced.ExpiresAt)
		require.Equal(w, w.now().Add(48*time.Hour), k.ExpiresAt)
		w.pass(48 * time.Hour)
		_, _, err = w.rotate(k.ID, "")
		require.ErrorIs(w, err, ErrExpiredKey)
	})
}

// TestChange: the script that changes records makes all changes or none, and repeating a call
// changes nothing.
func TestChange(t *testing.T) {
	both(t, func(w *world) {
		hash := func(s string) auth.Hash { return auth.SHA256(s) }
		has := func(want map[string]string) {
			w.Helper()
			named := map[string]string{}
			for name, text := range want {
				named[string(hash(name))] = text
			}
			require.Equal(w, named, w.cmd.HGetAll(w.Context(), w.space.AuthKeys()).Val())
		}
		for range 2 {
			require.NoError(w, w.store.apply(w.Context(), change{hash("a"), "", "1"}, change{hash("b"), "", "2"}))
			has(map[string]string{"a": "1", "b": "2"})
		}
		for range 2 {
			require.NoError(w, w.store.apply(w.Context(),
				change{hash("a"), "1", ""}, change{hash("b"), "2", "3"}, change{hash("c"), "", "4"}))
			has(map[string]string{"b": "3", "c": "4"})
		}
		for _, wrong := range []change{{hash("b"), "2", "5"}, {hash("b"), "", "5"}, {hash("a"), "1", "5"}, {hash("c"), "3", ""}} {
			require.ErrorIs(w, w.store.apply(w.Context(), change{hash("d"), "", "6"}, wrong), errChanged)
			has(map[string]string{"b": "3", "c": "4"})
		}
	})
}

// fill stores n keys, past the store.
func fill(t testing.TB, c redis.UniversalClient, key string, n int) {
	t.Helper()
	for from := 0; from < n; from += 1000 {
		values := map[string]string{}
		for i := from; i < min(n, from+1000); i++ {
			hash := auth.SHA256(fmt.Sprint(i))
			text, err := json.Marshal(Record{ID: hash.KeyID(), Role: auth.Reader, CreatedAt: newClock().now()})
			require.NoError(t, err)
			values[string(hash)] = string(text)
		}
		require.NoError(t, c.HSet(t.Context(), key, values).Err())
	}
}

func TestKeysAreBounded(t *testing.T) {
	both(t, func(w *world) {
		fill(w, w.cmd, w.space.AuthKeys(), MaxKeys-1)
		last := w.create(Request{Role: auth.Admin})
		_, err := w.store.Create(w.Context(), Request{Role: auth.Admin})
		require.ErrorIs(w, err, ErrFull)
		_, _, err = w.rotate(last.ID, "")
		require.ErrorIs(w, err, ErrFull)
		keys := w.list()
		require.Len(w, keys, MaxKeys)
		require.Contains(w, keys, last.Record, "a refused rotation changes nothing")
		require.NoError(w, w.store.Revoke(w.Context(), keys[0].ID))
		w.create(Request{Role: auth.Admin})

		// If the hash has more than 2 * MaxKeys records, something else writes to it: reading
		// fails.
		fill(w, w.cmd, w.space.AuthKeys(), 2*MaxKeys+1)
		_, _, err = w.store.List(w.Context())
		require.ErrorContains(w, err, "has more than 20000 records")
	})
}

// TestExpiredKeysAreRemoved: Create removes the record of a key that expired as long as expiredKept
// ago, and keeps that of a key that expired later.
func TestExpiredKeysAreRemoved(t *testing.T) {
	both(t, func(w *world) {
		w.create(Request{Role: auth.Admin, Lifetime: time.Hour})
		late := w.create(Request{Role: auth.Admin, Lifetime: 2 * time.Hour})
		w.pass(expiredKept + time.Hour)
		k := w.create(Request{Role: auth.Reader})
		require.Equal(w, []Record{late.Record, k.Record}, w.list())
	})
}

// TestUnusableRecords: List returns unusable records apart from the others, for example those with
// fields that this version does not know, which may restrict their keys. Such a key can't be
// rotated, but it can be revoked.
func TestUnusableRecords(t *testing.T) {
	both(t, func(w *world) {
		good := w.create(Request{Role: auth.Admin})
		hash := auth.SHA256("x")
		for want, text := range map[string]string{
			"unknown field":                   `{"id":"` + hash.KeyID() + `","role":"reader","networks":["10.0.0.0/8"]}`,
			"its id does not belong":          `{"id":"` + good.ID + `","role":"reader"}`,
			"role \"root\"":                   `{"id":"` + hash.KeyID() + `","role":"root"}`,
			"a producer needs one":            `{"id":"` + hash.KeyID() + `","role":"producer"}`,
			"invalid character":               `secret`,
			"text follows":                    `{"id":"` + hash.KeyID() + `","role":"reader"}{}`,
			"EOF":                             ``,
			"cannot unmarshal number":         `{"id":7}`,
			"its id does not belong to its h": `{}`,
		} {
			require.NoError(w, w.cmd.HSet(w.Context(), w.space.AuthKeys(), string(hash), text).Err())
			keys, unusable, err := w.store.List(w.Context())
			require.NoError(w, err)
			require.Equal(w, []Record{good.Record}, keys)
			require.Len(w, unusable, 1)
			require.ErrorContains(w, unusable[0], "key "+hash.KeyID()+": its record can't be used: ")
			require.ErrorContains(w, unusable[0], want)
			_, _, err = w.rotate(hash.KeyID(), "")
			require.ErrorContains(w, err, want)
		}
		require.NoError(w, w.store.Revoke(w.Context(), hash.KeyID()))
		require.Equal(w, []Record{good.Record}, w.list())
	})
}

func TestWrongRedisType(t *testing.T) {
	both(t, func(w *world) {
		require.NoError(w, w.cmd.Set(w.Context(), w.space.AuthKeys(), "x", 0).Err())
		_, err := w.store.Create(w.Context(), Request{Role: auth.Admin})
		require.ErrorContains(w, err, "WRONGTYPE")
	})
}

// TestOutOfMemory: while Redis's memory is full, a key can be revoked, and a rotation is refused
// without any change.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, redistest.Server(t).URL(), "t:", nil)
	k := w.create(Request{Role: auth.Admin})
	_, err := w.auth.Authenticate(t.Context(), k.Token, client)
	require.NoError(t, err)
	require.NoError(t, w.cmd.ConfigSet(t.Context(), "maxmemory", "1").Err())
	_, _, err = w.rotate(k.ID, "")
	require.True(t, call.IsOOM(err), "%v", err)
	w.step() // does not fail because it can't store the last use
	require.Equal(t, []Record{k.Record}, w.list())
	require.NoError(t, w.store.Revoke(t.Context(), k.ID))
	require.Empty(t, w.list())
}

// TestKeysOnACluster: on a Redis Cluster, a key can be created, used, rotated and revoked.
func TestKeysOnACluster(t *testing.T) {
	t.Parallel()
	url, _ := redistest.Cluster(t, 3)
	w := newWorld(t, url, "t:", nil)
	k := w.create(Request{Role: auth.Producer, Tenant: "acme"})
	_, err := w.auth.Authenticate(t.Context(), k.Token, client)
	require.NoError(t, err)
	w.step()
	_, old, err := w.rotate(k.ID, "")
	require.NoError(t, err)
	require.Equal(t, "2026-11-25", old.LastUsedDay)
	require.NoError(t, w.store.Revoke(t.Context(), k.ID))
	require.Len(t, w.list(), 1)
}

// TestPepperedStore: if the process has a pepper, a key that is stored under its plain SHA-256 is
// refused: a program that can write to Redis, but does not know the pepper, can't make a valid key.
func TestPepperedStore(t *testing.T) {
	both(t, func(w *world) {
		peppered, err := auth.ReadHasher(pepperFile(w.T))
		require.NoError(w, err)
		a := New(Options{Store: NewStore(w.cmd, w.space, peppered, w.now), Log: w.auth.log, Now: w.now})
		forged := w.create(Request{Role: auth.Admin})
		k, err := a.store.Create(w.Context(), Request{Role: auth.Operator})
		require.NoError(w, err)
		require.NotEqual(w, auth.SHA256(k.Token).KeyID(), k.ID)
		p, err := a.Authenticate(w.Context(), k.Token, client)
		require.NoError(w, err)
		require.Equal(w, auth.Principal{KeyID: k.ID, Role: auth.Operator, Payloads: true}, p)
		_, err = a.Authenticate(w.Context(), forged.Token, client)
		require.ErrorIs(w, err, ErrInvalid)
	})
}

func TestAuthKeysIsOutsideOfThePartitions(t *testing.T) {
	t.Parallel()
	space, err := keyspace.New("bulk-action:", 4)
	require.NoError(t, err)
	require.Equal(t, "bulk-action:auth:keys", space.AuthKeys())
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// clock is a clock that stands still until a test moves it.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func newClock() *clock { return &clock{t: time.Date(2026, 11, 25, 23, 59, 0, 0, time.UTC)} }

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

// world is a key store for tests, and a process that checks keys. The process has a connection of
// its own, whose commands are counted and which the test can break.
type world struct {
	*testing.T
	*clock
	store *Store // of operators
	auth  *Authenticator
	cmd   redis.UniversalClient
	space keyspace.Space
	link  *link
	log   *bytes.Buffer // read it only when no call runs
}

// link is the connection of the process to Redis.
type link struct {
	redistest.NoHook
	mu       sync.Mutex
	fault    error         // of each command, if set
	hold     chan struct{} // each command waits until it is closed, if set
	commands atomic.Int64
}

func (l *link) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		l.commands.Add(1)
		l.mu.Lock()
		fault, hold := l.fault, l.hold
		l.mu.Unlock()
		if hold != nil {
			<-hold
		}
		if fault != nil {
			cmd.SetErr(fault)
			return fault
		}
		return next(ctx, cmd)
	}
}

func (l *link) set(fault error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = fault
}

// away is the error of a call to a Redis that does not answer.
var away error = &net.OpError{Op: "dial", Err: context.DeadlineExceeded}

func connect(t testing.TB, url string) redis.UniversalClient {
	t.Helper()
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url, PoolMaxActive: 4, CommandTimeout: 30 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn.Cmd
}

func newWorld(t *testing.T, url, prefix string, file *File) *world {
	t.Helper()
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	w := &world{T: t, clock: newClock(), cmd: connect(t, url), space: space, link: &link{}, log: &bytes.Buffer{}}
	w.store = NewStore(w.cmd, space, auth.Hasher{}, w.now)
	process := connect(t, url)
	process.AddHook(w.link)
	w.auth = New(Options{
		Store: NewStore(process, space, auth.Hasher{}, w.now), File: file,
		Log: slog.New(slog.NewTextHandler(w.log, nil)), Now: w.now,
	})
	return w
}

// both runs a test twice: on Redis and on miniredis, each with a world of its own.
func both(t *testing.T, test func(w *world)) {
	t.Helper()
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) { test(newWorld(t, url, prefix, nil)) })
}

func (w *world) create(r Request) NewKey {
	w.Helper()
	k, err := w.store.Create(w.Context(), r)
	require.NoError(w, err)
	return k
}

func (w *world) list() []Record {
	w.Helper()
	keys, unusable, err := w.store.List(w.Context())
	require.NoError(w, err)
	require.Empty(w, unusable)
	return keys
}

func (w *world) step() {
	w.Helper()
	_, err := w.auth.Step(w.Context())
	require.NoError(w, err)
}
