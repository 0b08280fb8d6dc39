package session_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

var who = auth.Principal{KeyID: "key_abc", Role: auth.Producer, Tenant: "acme", Payloads: true}

type world struct {
	*testing.T
	redis  *redis.Client
	prefix string
	time   time.Time
	hasher auth.Hasher
	store  *session.Store
}

func (w *world) now() time.Time { return w.time }

func (w *world) process() *session.Store {
	space, err := keyspace.New(w.prefix, 1)
	require.NoError(w, err)
	return session.New(w.redis, space, w.hasher, w.now)
}

func both(t *testing.T, test func(*world)) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		opt, err := redis.ParseURL(url)
		require.NoError(t, err)
		w := &world{T: t, redis: redis.NewClient(opt), prefix: prefix, time: time.Now()}
		t.Cleanup(func() { require.NoError(t, w.redis.Close()) })
		w.store = w.process()
		test(w)
	})
}

func (w *world) create() string {
	w.Helper()
	token, err := w.store.Create(w.Context(), who)
	require.NoError(w, err)
	return token
}

func (w *world) works(s *session.Store, token string) {
	w.Helper()
	p, err := s.Find(w.Context(), token, true)
	require.NoError(w, err)
	require.Equal(w, who, p)
}

func (w *world) refused(s *session.Store, token string) {
	w.Helper()
	p, err := s.Find(w.Context(), token, true)
	require.ErrorIs(w, err, session.ErrNone)
	require.Zero(w, p)
}

// TestRecord: Redis holds the hash of the token, not the token itself. The record's TTL is twelve
// hours.
func TestRecord(t *testing.T) {
	both(t, func(w *world) {
		token := w.create()
		require.Len(w, token, 43)
		require.NotEqual(w, token, w.create())
		key := w.prefix + "auth:session:" + string(auth.SHA256(token))
		text, err := w.redis.Get(w.Context(), key).Result()
		require.NoError(w, err)
		require.NotContains(w, text, token)
		require.InDelta(w, session.Lifetime.Seconds(), w.redis.TTL(w.Context(), key).Val().Seconds(), 60)
		w.works(w.store, token)
		w.works(w.process(), token)
	})
}

// TestPepper: with a pepper, a program that can write to Redis can't make a session, nor change the
// key, the rights or the start of one.
func TestPepper(t *testing.T) {
	pepper := filepath.Join(t.TempDir(), "pepper")
	require.NoError(t, os.WriteFile(pepper, []byte(strings.Repeat("p", 32)), 0o600))
	hasher, err := auth.ReadHasher(pepper)
	require.NoError(t, err)
	both(t, func(w *world) {
		plain := w.create()
		w.hasher = hasher
		w.store = w.process()
		w.refused(w.store, plain)

		token := w.create()
		key := w.prefix + "auth:session:" + string(hasher.Hash(token))
		text, err := w.redis.Get(w.Context(), key).Result()
		require.NoError(w, err)
		forged := w.prefix + "auth:session:" + string(auth.SHA256(plain))
		require.NoError(w, w.redis.Set(w.Context(), forged, text, session.Lifetime).Err())
		w.refused(w.process(), plain)

		var record map[string]any
		require.NoError(w, json.Unmarshal([]byte(text), &record))
		for field, value := range map[string]any{
			"key": "key_admin", "role": auth.Admin, "tenant": "globex", "payloads": false,
			"created_at": w.time.Add(session.Lifetime).UTC(), "seal": "",
		} {
			changed := maps.Clone(record)
			require.Contains(w, changed, field)
			changed[field] = value
			text, err := json.Marshal(changed)
			require.NoError(w, err)
			require.NoError(w, w.redis.Set(w.Context(), key, text, session.Lifetime).Err())
			w.refused(w.process(), token)
		}
		require.NoError(w, w.redis.Set(w.Context(), key, text, session.Lifetime).Err())
		w.works(w.process(), token)
		other := w.create() // the record of a session is of no use under the hash of another one
		require.NoError(w, w.redis.Set(w.Context(), w.prefix+"auth:session:"+string(hasher.Hash(other)), text, 0).Err())
		w.refused(w.process(), other)

		w.time = w.time.Add(2 * time.Minute)
		w.works(w.process(), token) // and it stores the time of the request
		w.works(w.process(), token)
	})
}

func TestNoSession(t *testing.T) {
	both(t, func(w *world) {
		for _, token := range []string{"", "x", strings.Repeat("A", 43), strings.Repeat("A", 44)} {
			w.refused(w.store, token)
		}
		token := w.create()
		require.NoError(w, w.redis.Set(w.Context(), w.prefix+"auth:session:"+string(auth.SHA256(token)), "x", 0).Err())
		w.refused(w.process(), token)
	})
}

// TestEnds: a session that is used each Idle-1 s works twelve times, and not a thirteenth time. One
// that only a request of an open page has used ends after Idle.
func TestEnds(t *testing.T) {
	both(t, func(w *world) {
		token := w.create()
		for range 12 {
			w.time = w.time.Add(session.Idle - time.Second)
			w.works(w.store, token)
		}
		key := w.prefix + "auth:session:" + string(auth.SHA256(token))
		require.Positive(w, w.redis.TTL(w.Context(), key).Val(), "the end stays")
		w.time = w.time.Add(session.Idle - time.Second)
		w.refused(w.store, token)
		w.refused(w.process(), token)

		token = w.create()
		w.time = w.time.Add(session.Idle - time.Second)
		_, err := w.store.Find(w.Context(), token, false)
		require.NoError(w, err)
		w.time = w.time.Add(time.Second)
		w.refused(w.store, token)
	})
}

// TestEnd: a session that is ended at one process also ends at the others, after Fresh, and a late
// request does not restore it.
func TestEnd(t *testing.T) {
	both(t, func(w *world) {
		token, other := w.create(), w.process()
		w.works(other, token)
		require.NoError(w, w.store.End(w.Context(), token))
		w.refused(w.store, token)
		w.time = w.time.Add(session.Fresh)
		w.works(other, token)
		w.time = w.time.Add(1)
		w.refused(other, token)
		require.NoError(w, w.store.End(w.Context(), token))

		token = w.create()
		w.works(other, token)
		w.time = w.time.Add(58 * time.Second)
		w.works(other, token)
		require.NoError(w, w.store.End(w.Context(), token))
		w.time = w.time.Add(4 * time.Second)
		w.works(other, token) // and it tries to store the time of the request
		require.Zero(w, w.redis.Exists(w.Context(), w.prefix+"auth:session:"+string(auth.SHA256(token))).Val())
	})
}

// TestOutage: one minute after Redis went away, a process still knows a session that it has read;
// 15 minutes later, it does not. Another process does not know it, and none can be made or ended.
func TestOutage(t *testing.T) {
	t.Parallel()
	mini, url := redistest.Mini(t)
	opt, err := redis.ParseURL(url)
	require.NoError(t, err)
	opt.MaxRetries = -1
	w := &world{T: t, redis: redis.NewClient(opt), prefix: "t:", time: time.Now()}
	t.Cleanup(func() { require.NoError(t, w.redis.Close()) })
	w.store = w.process()
	token := w.create()
	mini.Close()
	w.works(w.store, token)
	w.time = w.time.Add(time.Minute)
	w.works(w.store, token)
	_, err = w.process().Find(t.Context(), token, true)
	require.ErrorIs(t, err, session.ErrUnavailable)
	_, err = w.store.Create(t.Context(), who)
	require.ErrorIs(t, err, session.ErrUnavailable)
	require.ErrorIs(t, w.store.End(t.Context(), token), session.ErrUnavailable)
	w.time = w.time.Add(15 * time.Minute)
	_, err = w.store.Find(t.Context(), token, true)
	require.ErrorIs(t, err, session.ErrUnavailable)
}

// TestOnce: FirstUse returns true only once for a form, whichever process is asked.
func TestOnce(t *testing.T) {
	both(t, func(w *world) {
		first, err := w.store.FirstUse(w.Context(), "a")
		require.NoError(w, err)
		require.True(w, first)
		for _, s := range []*session.Store{w.store, w.process()} {
			again, err := s.FirstUse(w.Context(), "a")
			require.NoError(w, err)
			require.False(w, again)
		}
		other, err := w.store.FirstUse(w.Context(), "b")
		require.NoError(w, err)
		require.True(w, other)
		keys, err := w.redis.Keys(w.Context(), w.prefix+"*").Result()
		require.NoError(w, err)
		require.Len(w, keys, 2)
		for _, key := range keys {
			ttl, err := w.redis.TTL(w.Context(), key).Result()
			require.NoError(w, err)
			require.Positive(w, ttl)
			require.LessOrEqual(w, ttl, session.Idle)
		}
	})
}
