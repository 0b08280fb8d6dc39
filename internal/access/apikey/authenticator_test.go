package apikey

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

var (
	client = netip.MustParseAddr("192.0.2.1")
	other  = netip.MustParseAddr("192.0.2.2")
)

func (w *world) accepted(k NewKey) {
	w.Helper()
	p, err := w.auth.Authenticate(w.Context(), k.Token, client)
	require.NoError(w, err)
	require.Equal(w, k.principal(), p)
	require.True(w, w.auth.Still(p))
}

func (w *world) refused(k NewKey, want error) {
	w.Helper()
	p, err := w.auth.Authenticate(w.Context(), k.Token, other)
	require.ErrorIs(w, err, want)
	require.Zero(w, p)
	require.False(w, w.auth.Still(k.principal()))
	require.NotContains(w, err.Error(), k.Token[4:])
}

func (w *world) commands() int64 { return w.link.commands.Load() }

// TestKnownKeysCostNoCommand: 1001 uses of a key, while the copy of the keys is new, cost one
// command. When the copy is older than copyTTL, the next use costs a second one.
func TestKnownKeysCostNoCommand(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Producer, Tenant: "acme"})
		w.accepted(k)
		require.EqualValues(w, 1, w.commands())
		for range 1000 {
			w.accepted(k)
		}
		require.EqualValues(w, 1, w.commands())
		w.pass(copyTTL + 1) // nothing calls Step: the request reads the keys
		w.accepted(k)
		require.EqualValues(w, 2, w.commands())
	})
}

// TestSimultaneousRequestsShareARead: 100 requests with one key that come while Redis holds back
// its answer cause one read of Redis.
func TestSimultaneousRequestsShareARead(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Admin})
		w.link.hold = make(chan struct{})
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				p, err := w.auth.Authenticate(w.Context(), k.Token, client)
				if err != nil || p.KeyID != k.ID {
					w.Errorf("%v %v", p, err)
				}
			})
		}
		for w.commands() == 0 {
			runtime.Gosched()
		}
		close(w.link.hold)
		all.Wait()
		require.EqualValues(w, 1, w.commands())
	})
}

// TestNewKeysWorkAtOnce: a key that is newer than the copy is looked up alone, once. Unknown tokens
// are looked up only within the limits of failures.
func TestNewKeysWorkAtOnce(t *testing.T) {
	both(t, func(w *world) {
		w.accepted(w.create(Request{Role: auth.Admin}))
		k := w.create(Request{Role: auth.Reader})
		w.pass(readPause / 2)
		before := w.commands()
		w.accepted(k)
		w.accepted(k)
		require.EqualValues(w, 1, w.commands()-before)
		before = w.commands()
		for range 3 * failuresBurst {
			_, err := w.auth.Authenticate(w.Context(), auth.NewToken(auth.Admin), client)
			require.Error(w, err)
		}
		require.LessOrEqual(w, w.commands()-before, int64(failuresBurst))
		w.accepted(k)
	})
}

// TestRevocation: a revoked key is accepted until the copy of the keys is copyTTL old, and then
// refused; earlier if Step has read the keys again. A key that was not revoked is still accepted.
func TestRevocation(t *testing.T) {
	both(t, func(w *world) {
		a, b := w.create(Request{Role: auth.Admin}), w.create(Request{Role: auth.Reader})
		w.accepted(a)
		w.accepted(b)
		require.NoError(w, w.store.Revoke(w.Context(), a.ID))
		w.pass(copyTTL)
		w.accepted(a)
		w.pass(1)
		w.refused(a, ErrInvalid)
		w.accepted(b)

		require.NoError(w, w.store.Revoke(w.Context(), b.ID))
		w.step() // the loop finds it earlier
		w.refused(b, ErrInvalid)
	})
}

func TestExpiry(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Admin, Lifetime: time.Minute})
		w.accepted(k)
		w.pass(time.Minute - 1)
		w.accepted(k)
		w.pass(1)
		w.refused(k, ErrInvalid)
	})
}

func TestRotationOverlaps(t *testing.T) {
	both(t, func(w *world) {
		old := w.create(Request{Role: auth.Producer, Tenant: "acme"})
		w.accepted(old)
		k, _, err := w.rotate(old.ID, "")
		require.NoError(w, err)
		w.pass(24*time.Hour - 1)
		w.accepted(old)
		w.accepted(k)
		w.pass(1)
		w.refused(old, ErrInvalid)
		w.accepted(k)
	})
}

// TestRoleIsThatOfTheToken: if the record of a reader's key in Redis is overwritten with the role
// admin, the key is refused, because the token itself names the role.
func TestRoleIsThatOfTheToken(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Reader})
		record := k.Record
		record.Role = auth.Admin
		text, err := record.encode()
		require.NoError(w, err)
		require.NoError(w, w.cmd.HSet(w.Context(), w.space.AuthKeys(), string(auth.SHA256(k.Token)), text).Err())
		w.refused(k, ErrInvalid)
	})
}

func TestUnusableRecordsAreLoggedOnce(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Reader})
		w.accepted(k)
		require.NoError(w, w.cmd.HSet(w.Context(), w.space.AuthKeys(), string(auth.SHA256(k.Token)), `{"new":1}`).Err())
		w.step()
		w.step()
		w.refused(k, ErrInvalid)
		require.Equal(w, 1, strings.Count(w.log.String(), `an API key is refused`))
		require.NotContains(w, w.log.String(), auth.SHA256(k.Token))
	})
}

// slowRedis is a fake of Redis that answers each page of keys after a pause. It has a number of
// pages with one key each.
type slowRedis struct {
	redistest.NoHook
	pause time.Duration
	pages []string // hash and record of a key, by page
}

func (s *slowRedis) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		select {
		case <-time.After(s.pause):
		case <-ctx.Done():
			cmd.SetErr(ctx.Err())
			return ctx.Err()
		}
		cursor := cmd.Args()[2].(uint64)
		at := 2 * int(cursor)
		next := (cursor + 1) % uint64(len(s.pages)/2)
		cmd.(*redis.ScanCmd).SetVal(s.pages[at:at+2], next)
		return nil
	}
}

// TestSlowRedisIsNotAway: a Redis that needs long for all keys, but answers each page in time, does
// not count as away: a revoked key is refused. If reading takes longer than a copy is valid, no key
// is accepted, because it may have been revoked meanwhile.
func TestSlowRedisIsNotAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := redis.NewClient(&redis.Options{MaxRetries: -1})
		defer c.Close()
		slow := &slowRedis{}
		c.AddHook(slow)
		space, err := keyspace.New("p:", 1)
		require.NoError(t, err)
		store := NewStore(c, space, auth.Hasher{}, time.Now)
		a := New(Options{Store: store, Log: slog.New(slog.DiscardHandler), Now: time.Now})
		var keys []NewKey
		for range 7 {
			k, err := store.New(Request{Role: auth.Reader})
			require.NoError(t, err)
			text, err := k.encode()
			require.NoError(t, err)
			keys, slow.pages = append(keys, k), append(slow.pages, string(store.hasher.Hash(k.Token)), text)
		}
		check := func(k NewKey) error {
			_, err := a.Authenticate(t.Context(), k.Token, client)
			return err
		}
		slow.pause = pageTimeout - 600*time.Millisecond // 9.8 s for all pages
		require.NoError(t, check(keys[0]))
		require.NoError(t, check(keys[5]))
		slow.pages = slow.pages[2:] // the first key is revoked
		time.Sleep(copyTTL)
		require.ErrorIs(t, check(keys[0]), ErrInvalid)
		require.NoError(t, check(keys[5]))

		slow.pause = pageTimeout - 1 // 12 s for the pages that are left
		time.Sleep(copyTTL)
		_, err = a.Step(t.Context())
		require.ErrorIs(t, err, errSlow)
		require.ErrorIs(t, check(keys[5]), ErrUnavailable)

		slow.pause = 0
		time.Sleep(readPause)
		require.NoError(t, check(keys[5]))
		slow.pause = pageTimeout + 1 // now Redis is away
		time.Sleep(copyTTL + 1)
		_, err = a.Step(t.Context())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, check(keys[5]))
	})
}

// TestOutage: while Redis is away, known keys are accepted, and others get ErrUnavailable, until
// the copy is older than OutageTTL.
func TestOutage(t *testing.T) {
	both(t, func(w *world) {
		k, unknown := w.create(Request{Role: auth.Admin}), NewKey{Token: auth.NewToken(auth.Admin)}
		w.link.set(away)
		w.refused(k, ErrUnavailable) // the keys were never read
		w.link.set(nil)
		w.pass(readPause)
		w.accepted(k)

		w.link.set(away)
		w.pass(copyTTL + 1)
		w.accepted(k)
		w.refusedAsUnknown(unknown, ErrUnavailable)
		_, err := w.auth.Step(w.Context())
		require.ErrorIs(w, err, away)
		w.pass(OutageTTL - copyTTL - 1)
		w.accepted(k)
		w.pass(1)
		w.refused(k, ErrUnavailable)

		require.NoError(w, w.store.Revoke(w.Context(), k.ID))
		w.link.set(nil)
		w.pass(readPause)
		w.refused(k, ErrInvalid)
		w.refusedAsUnknown(unknown, ErrInvalid)
	})
}

func (w *world) refusedAsUnknown(k NewKey, want error) {
	w.Helper()
	_, err := w.auth.Authenticate(w.Context(), k.Token, other)
	require.ErrorIs(w, err, want)
}

// TestOtherErrorsDoNotExtendTheCopy: after an error that does not mean an outage, such as a missing
// right, the copy is not used longer than usual, because keys can still be revoked.
func TestOtherErrorsDoNotExtendTheCopy(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Admin})
		w.accepted(k)
		w.link.set(errors.New("NOPERM this user has no permissions"))
		w.pass(copyTTL)
		w.accepted(k)
		w.pass(1)
		w.refused(k, ErrUnavailable)
	})
}

// TestKnownKeysDoNotWaitDuringAnOutage: during an outage in which Redis does not answer at all,
// requests with known keys don't wait for the read that another request has started.
func TestKnownKeysDoNotWaitDuringAnOutage(t *testing.T) {
	both(t, func(w *world) {
		k := w.create(Request{Role: auth.Admin})
		w.accepted(k)
		w.link.set(away)
		w.pass(copyTTL + 1)
		w.accepted(k) // finds the outage
		w.pass(readPause)
		hold, before := make(chan struct{}), w.commands()
		w.link.mu.Lock()
		w.link.hold = hold
		w.link.mu.Unlock()
		var first sync.WaitGroup
		first.Go(func() { _, _ = w.auth.Authenticate(w.Context(), k.Token, client) })
		for w.commands() == before {
			runtime.Gosched()
		}
		for range 100 {
			w.accepted(k) // the first request is still reading
		}
		require.Equal(w, before+1, w.commands())
		close(hold)
		first.Wait()
	})
}

// TestWrongKeys: 50,000 unknown tokens of one client cause one read of Redis; so do limitedClients
// tokens, each of a client of its own, and 50,000 of others a second later, which take less than 2
// MiB. A valid key is accepted after each thousand. The test is not parallel, because it measures
// the memory of the process.
func TestWrongKeys(t *testing.T) {
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, nil)
	k := w.create(Request{Role: auth.Producer, Tenant: "acme"})
	w.accepted(k)
	attack := func(n int, from func(i int) netip.Addr) (invalid, limited int) {
		for i := range n {
			_, err := w.auth.Authenticate(t.Context(), auth.NewToken(auth.Admin), from(i))
			var tooMany *TooManyFailuresError
			switch {
			case errors.As(err, &tooMany):
				require.Positive(t, tooMany.RetryAfter)
				require.LessOrEqual(t, tooMany.RetryAfter, 6*time.Second)
				limited++
			case errors.Is(err, ErrInvalid):
				invalid++
			default:
				require.Fail(t, "unexpected", "%v", err)
			}
			if i%1000 == 0 {
				p, err := w.auth.Authenticate(t.Context(), k.Token, from(i))
				require.NoError(t, err)
				require.Equal(t, k.ID, p.KeyID)
			}
		}
		return invalid, limited
	}
	w.pass(readPause)
	before := w.commands()
	invalid, limited := attack(50_000, func(int) netip.Addr { return client })
	require.Equal(t, failuresBurst, invalid)
	require.Equal(t, 50_000-failuresBurst, limited)
	require.EqualValues(t, 1, w.commands()-before)

	each := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}) }
	w.pass(time.Minute)
	before = w.commands()
	invalid, _ = attack(limitedClients, each) // fills the memory of clients
	require.Equal(t, failuresInAll, invalid)
	full := heap()
	w.pass(time.Second)
	invalid, _ = attack(50_000, func(i int) netip.Addr { return each(i + limitedClients) })
	require.Equal(t, failuresInAll, invalid)
	require.EqualValues(t, 2, w.commands()-before)
	require.Less(t, heap(), full+2<<20, "bytes")
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestMalformedTokens: texts that are no tokens count as failures, but cause no read of Redis.
func TestMalformedTokens(t *testing.T) {
	both(t, func(w *world) {
		for i := range failuresBurst + 5 {
			_, err := w.auth.Authenticate(w.Context(), fmt.Sprint("bka_", i), client)
			if i < failuresBurst {
				require.ErrorIs(w, err, ErrInvalid)
				require.ErrorIs(w, err, auth.ErrNotAToken)
			} else {
				require.ErrorContains(w, err, "too many failed authentications: try again in 6 s")
			}
		}
		require.Zero(w, w.commands())
		w.pass(6 * time.Second)
		_, err := w.auth.Authenticate(w.Context(), "x", client)
		require.ErrorIs(w, err, ErrInvalid)
		_, err = w.auth.Authenticate(w.Context(), "x", client)
		require.NotErrorIs(w, err, ErrInvalid)
		_, err = w.auth.Authenticate(w.Context(), "x", other)
		require.ErrorIs(w, err, ErrInvalid)
	})
}

// TestLastUse: the day of the last use is written once a day for a key, although two processes see
// it, and no other field of its record changes. A key that is not used keeps its record.
func TestLastUse(t *testing.T) {
	both(t, func(w *world) {
		a, b := w.create(Request{Role: auth.Admin, Name: "a"}), w.create(Request{Role: auth.Reader, Name: "b"})
		second := New(Options{Store: w.store, Log: w.auth.log, Now: w.now})
		for range 10 {
			w.accepted(a)
			_, err := second.Authenticate(w.Context(), a.Token, client)
			require.NoError(w, err)
		}
		require.EqualValues(w, 1, w.commands())
		w.step()
		_, err := second.Step(w.Context())
		require.NoError(w, err)
		want := a.Record
		want.LastUsedDay = "2026-11-25"
		require.ElementsMatch(w, []Record{want, b.Record}, w.list())

		w.step() // reads the new record
		before := w.commands()
		w.accepted(a)
		w.step()
		require.EqualValues(w, 1, w.commands()-before, "it reads, but writes nothing")

		w.pass(time.Minute) // the next day
		w.accepted(a)
		w.step()
		want.LastUsedDay = "2026-11-26"
		require.ElementsMatch(w, []Record{want, b.Record}, w.list())

		// A process that has read a key before it was revoked or rotated, and then stores its last
		// use, does not undo the revocation or rotation.
		w.step()
		w.pass(24 * time.Hour)
		w.accepted(a)
		w.accepted(b)
		stale := w.auth.current()
		require.NoError(w, w.store.Revoke(w.Context(), a.ID))
		_, rotated, err := w.rotate(b.ID, "")
		require.NoError(w, err)
		require.NoError(w, w.auth.storeUses(w.Context(), stale))
		keys := w.list()
		require.Len(w, keys, 2)
		require.Contains(w, keys, rotated)
	})
}

// TestLastUsesOfManyKeys: of the last uses of usedBatch+10 keys, the first step stores usedBatch,
// and the second one the others.
func TestLastUsesOfManyKeys(t *testing.T) {
	both(t, func(w *world) {
		var all []NewKey
		for range usedBatch + 10 {
			all = append(all, w.create(Request{Role: auth.Metrics}))
		}
		for _, k := range all {
			w.accepted(k)
		}
		usedToday := func() (n int) {
			for _, r := range w.list() {
				if r.LastUsedDay != "" {
					n++
				}
			}
			return n
		}
		w.step()
		require.Equal(w, usedBatch, usedToday())
		w.step()
		require.Equal(w, len(all), usedToday())
		require.Empty(w, w.auth.used)
	})
}

// TestAuthenticateByFile: the keys of a file are valid while Redis is away, and without any store
// in Redis. Step reads a changed file again.
func TestAuthenticateByFile(t *testing.T) {
	t.Parallel()
	k, err := Request{Role: auth.Operator}.New(auth.SHA256, newClock().now())
	require.NoError(t, err)
	path := writeFile(t, "keys", line(t, "ops", k)+"\n")
	file, err := OpenFile(path)
	require.NoError(t, err)
	_, url := redistest.Mini(t)
	w := newWorld(t, url, "t:", file)
	w.link.set(away)
	alone := New(Options{File: file, Log: slog.New(slog.DiscardHandler), Now: w.now})
	want := auth.Principal{KeyID: "ops", Role: auth.Operator, Payloads: true}
	for _, a := range []*Authenticator{w.auth, alone} {
		p, err := a.Authenticate(t.Context(), k.Token, client)
		require.NoError(t, err)
		require.Equal(t, want, p)
		require.True(t, a.Still(p))
	}
	unknown := auth.NewToken(auth.Operator)
	_, err = w.auth.Authenticate(t.Context(), unknown, client)
	require.ErrorIs(t, err, ErrUnavailable)
	_, err = alone.Authenticate(t.Context(), unknown, client)
	require.ErrorIs(t, err, ErrInvalid)
	require.False(t, alone.Still(auth.Principal{KeyID: "x"}))

	step := func() {
		t.Helper()
		idle, err := alone.Step(t.Context())
		require.NoError(t, err)
		require.LessOrEqual(t, idle, copyTTL)
	}
	w.auth.store, w.auth.used = nil, nil // only the file, with the log that the test reads
	reload := func(text string) string {
		t.Helper()
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		w.log.Reset()
		_, err := w.auth.Step(t.Context())
		require.NoError(t, err)
		step()
		return w.log.String()
	}
	require.Contains(t, reload("ops admin\n"), "the keys read before stay valid")
	require.True(t, alone.Still(want))
	require.Empty(t, reload("ops admin\n"), "a mistake is logged once")
	require.Contains(t, reload("# nobody\n"), "has changed and is in use")
	require.False(t, alone.Still(want))
	_, err = alone.Authenticate(t.Context(), k.Token, client)
	require.ErrorIs(t, err, ErrInvalid)

	// The role of a line must be that of the token.
	reload(strings.Replace(line(t, "ops", k), "operator", "admin", 1))
	_, err = alone.Authenticate(t.Context(), k.Token, client)
	require.ErrorIs(t, err, ErrInvalid)
}

func BenchmarkAuthenticate(b *testing.B) {
	w, k := benchWorld(b)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.Authenticate(b.Context(), k.Token, client); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRead reads the largest number of keys.
func BenchmarkRead(b *testing.B) {
	before := heap()
	w, _ := benchWorld(b)
	perKey := float64(heap()-before) / MaxKeys
	for b.Loop() {
		if c := w.read(b.Context()); c.err != nil {
			b.Fatal(c.err)
		}
	}
	b.ReportMetric(perKey, "B/key")
}

// benchWorld returns a process whose copy has MaxKeys keys, and the token of one of them.
func benchWorld(b *testing.B) (*Authenticator, NewKey) {
	b.Helper()
	url, prefix := redistest.Shared(b)
	space, err := keyspace.New(prefix, 1)
	require.NoError(b, err)
	cmd := connect(b, url)
	fill(b, cmd, space.AuthKeys(), MaxKeys-1)
	s := NewStore(cmd, space, auth.Hasher{}, newClock().now)
	k, err := s.Create(b.Context(), Request{Role: auth.Admin})
	require.NoError(b, err)
	a := New(Options{Store: s, Log: slog.New(slog.DiscardHandler), Now: newClock().now})
	_, err = a.Authenticate(b.Context(), k.Token, client)
	require.NoError(b, err)
	return a, k
}

func TestWaitIsInWholeSeconds(t *testing.T) {
	err := &TooManyFailuresError{RetryAfter: 5450843565}
	require.EqualError(t, err, "too many failed authentications: try again in 6 s")
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func pepperFile(t *testing.T) string {
	return writeFile(t, "pepper", strings.Repeat("pepper", 10)+"\n")
}

func TestKeysOfAFile(t *testing.T) {
	t.Parallel()
	a, p, r := auth.NewToken(auth.Admin), auth.NewToken(auth.Producer), auth.NewToken(auth.Reader)
	path := writeFile(t, "keys", "# keys\n\n root admin - "+string(auth.SHA256(a))+" # break glass\n"+
		"shop\tproducer\tacme  "+string(auth.SHA256(p))+"\r\n"+
		"board reader acme "+string(auth.SHA256(r))) // the last line has no end
	f, err := OpenFile(path)
	require.NoError(t, err)
	for token, want := range map[string]auth.Principal{
		a: {KeyID: "root", Role: auth.Admin, Payloads: true},
		p: {KeyID: "shop", Role: auth.Producer, Tenant: "acme", Payloads: true},
		r: {KeyID: "board", Role: auth.Reader, Tenant: "acme"},
	} {
		got, ok := f.find(auth.SHA256(token))
		require.True(t, ok)
		require.Equal(t, want, got)
		require.True(t, f.has(got))
	}
	_, ok := f.find(auth.SHA256(auth.NewToken(auth.Admin)))
	require.False(t, ok)
	require.False(t, f.has(auth.Principal{}))
	require.False(t, f.has(auth.Principal{KeyID: "board", Role: auth.Admin}))
}

func line(t *testing.T, id string, k NewKey) string {
	t.Helper()
	text, err := FileLine(id, k)
	require.NoError(t, err)
	return text
}

// TestFileLine: the line that a command prints is one that the file takes.
func TestFileLine(t *testing.T) {
	t.Parallel()
	var lines, tokens []string
	for _, r := range []Request{{Role: auth.Service}, {Role: auth.Producer, Tenant: "*"}} {
		k, err := r.New(auth.SHA256, newClock().now())
		require.NoError(t, err)
		lines, tokens = append(lines, line(t, k.ID, k)), append(tokens, k.Token)
	}
	_, err := FileLine("a b", NewKey{})
	require.ErrorContains(t, err, `id "a b": must match`)
	f, err := OpenFile(writeFile(t, "keys", strings.Join(lines, "\n")))
	require.NoError(t, err)
	for _, token := range tokens {
		p, ok := f.find(auth.SHA256(token))
		require.True(t, ok)
		require.Equal(t, auth.SHA256(token).KeyID(), p.KeyID)
	}
}

// TestMistakesOfAFile: ten mistakes in a file of eleven lines are reported together, with their
// lines, and without the token that two of them contain.
func TestMistakesOfAFile(t *testing.T) {
	t.Parallel()
	hash, token := string(auth.SHA256("x")), auth.NewToken(auth.Admin)
	path := writeFile(t, "keys", strings.Join([]string{
		"a admin - " + hash,
		"a/b admin - " + string(auth.SHA256("2")),
		"c root - " + string(auth.SHA256("3")),
		"d producer - " + string(auth.SHA256("4")),
		"e admin acme " + string(auth.SHA256("5")),
		"f admin -",
		"g admin - " + strings.ToUpper(hash),
		"h admin - " + token,
		token + " admin - " + string(auth.SHA256("9")),
		"a admin - " + string(auth.SHA256("10")),
		"k admin - " + hash,
	}, "\n"))
	_, err := OpenFile(path)
	require.Error(t, err)
	text := err.Error()
	require.True(t, strings.HasPrefix(text, "read API keys in "+path+":\n"), text)
	lines := strings.Split(text, "\n")[1:]
	for i, want := range []string{
		"line 2: id: must match ^[A-Za-z0-9._-]{1,128}$",
		`line 3: role "root": must be one of admin, operator`,
		"line 4: tenant: a producer needs one",
		`line 5: tenant "acme": a key of role admin has none`,
		"line 6: has 3 fields; write ID ROLE TENANT SHA256",
		"line 7: sha256: must be 64 hexadecimal digits, in lower case",
		"line 8: has the key itself: write its SHA-256, and revoke this key",
		"line 9: has the key itself",
		"line 10: id a: line 1 has it too",
		"line 11: sha256: line 1 has the same key",
	} {
		require.Contains(t, lines[i], want)
	}
	require.Len(t, lines, 10)
	require.NotContains(t, text, token[4:])

	_, err = OpenFile(path + "x")
	require.ErrorContains(t, err, "no such file")
	path = writeFile(t, "keys", "")
	require.NoError(t, os.Chmod(path, 0o646))
	_, err = OpenFile(path)
	require.ErrorContains(t, err, "others may write it (mode 0646); run chmod o-w on it")
	require.NoError(t, os.Chmod(path, 0o644)) // hashes are no secrets
	_, err = OpenFile(path)
	require.NoError(t, err)
	_, err = OpenFile(writeFile(t, "keys", strings.Repeat("#", 1<<20+1)))
	require.ErrorContains(t, err, "larger than 1048576 bytes")
}
