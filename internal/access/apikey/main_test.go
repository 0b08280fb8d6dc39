package apikey

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
