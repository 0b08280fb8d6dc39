// Package stagetest is the world that a stage is tested in: an installation on a Redis, into which
// a test puts groups, in which it plays the other roles, and out of which it reads what became of
// the jobs. Whenever it reads a group's counts, it holds the ledger against the states of the jobs.
package stagetest

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/reducer"
)

// Patience is how long a test waits for what must happen; a healthy run needs a fraction.
const Patience = 30 * time.Second

// World is an installation. Its methods end the test when they fail.
type World struct {
	T     testing.TB
	URL   string
	Conn  *redisx.Conn
	Space keyspace.Space
	P     keyspace.Partition // the first one
	Tel   *telemetry.Telemetry
	Store *groups.Store
}

// New is an installation of so many partitions on the Redis at url.
func New(t testing.TB, url, prefix string, partitions int) *World {
	t.Helper()
	w := &World{T: t, URL: url, Tel: telemetry.Nop()}
	w.Conn = w.Connect()
	var err error
	w.Space, err = keyspace.New(prefix, partitions)
	require.NoError(t, err)
	w.P = w.Space.Partition(0)
	w.Store = w.NewStore(groups.Config{KeepIdempotencyKeys: time.Hour})
	return w
}

// Shared is an installation of one partition on the redis-server that the tests of the
// package share.
func Shared(t testing.TB) *World {
	t.Helper()
	url, prefix := redistest.Shared(t)
	return New(t, url, prefix, 1)
}

// Both runs a test on a real server and on miniredis, at the same time as others.
func Both(t *testing.T, test func(*World)) {
	t.Helper()
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		test(New(t, url, prefix, 1))
	})
}

// Connect opens one more connection, as another process would have it.
func (w *World) Connect() *redisx.Conn {
	w.T.Helper()
	conn, err := redisx.Connect(w.ctx(), redisx.Config{
		URL:            w.URL,
		PoolMaxActive:  50,
		DialTimeout:    time.Second,
		CommandTimeout: 3 * time.Second,
	})
	require.NoError(w.T, err)
	w.T.Cleanup(func() { _ = conn.Close() })
	return conn
}

// NewStore is one more store on the installation.
func (w *World) NewStore(cfg groups.Config) *groups.Store {
	return groups.New(cfg, w.Conn, w.Space, w.Tel, reducer.NewRegistry(), nil)
}

// ctx outlives the test's own, for clean-ups.
func (w *World) ctx() context.Context { return context.WithoutCancel(w.T.Context()) }

// Run runs a role in the background until stop is called, at the latest when the test ends. Stop
// waits for it.
func (w *World) Run(role interface{ Run(context.Context) error }) (stop func()) {
	ctx, cancel := context.WithCancel(w.ctx())
	ended := make(chan error, 1)
	go func() { ended <- role.Run(ctx) }()
	done := false
	stop = func() {
		w.T.Helper()
		if done {
			return
		}
		done = true
		cancel()
		select {
		case err := <-ended:
			require.NoError(w.T, err)
		case <-time.After(Patience):
			require.Fail(w.T, "the role does not stop")
		}
	}
	w.T.Cleanup(stop)
	return stop
}

// Await looks until ok, for what no event tells.
func (w *World) Await(what string, ok func() bool) {
	w.T.Helper()
	expired := time.After(Patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-expired:
			require.Fail(w.T, "await "+what, "not so after %s", Patience)
		}
	}
}

// Receive waits for what comes out of a channel.
func Receive[T any](t testing.TB, from <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(Patience):
		require.Fail(t, "await "+what, "nothing after %s", Patience)
		panic("unreachable")
	}
}

// Submit stores a sealed group.
func (w *World) Submit(g messages.SubmitGroup) {
	w.T.Helper()
	g.Seal = true
	_, err := w.Store.Submit(w.ctx(), &g, groups.Origin{At: time.Now()})
	require.NoError(w.T, err)
}

// Jobs stores a sealed group of tenant acme with n jobs, whose payload is their number.
func (w *World) Jobs(group, typ string, n int) {
	w.T.Helper()
	w.Submit(messages.SubmitGroup{ID: group, Tenant: "acme", Type: typ, Jobs: Numbered(n)})
}

// Numbered are n jobs whose payload is their number.
func Numbered(n int) []messages.Job {
	jobs := make([]messages.Job, n)
	for i := range jobs {
		jobs[i].Payload = fmt.Appendf(nil, `%d`, i)
	}
	return jobs
}

// Admit hands out what waits of a type in all partitions, as a fetcher without a limit would.
func (w *World) Admit(typ string) {
	w.T.Helper()
	for _, p := range w.Space.All() {
		for {
			r, err := ledger.Admit(w.ctx(), w.Conn.Cmd, p, ledger.AdmitArgs{
				Type:        typ,
				Most:        200,
				Cap:         1 << 30,
				Limit:       ledger.Limit{Window: time.Second},
				Seed:        "0badcafe",
				LaneWeights: [3]int{6, 3, 1},
			})
			require.NoError(w.T, err)
			if r.Moved == 0 {
				break
			}
		}
	}
}

// Feed hands out what waits, again and again, promotes what is due and takes back what was idle for
// a lease, as a fetcher and a dispatcher without limits would, until the test ends. Errors are
// passed over: Redis may be away.
func (w *World) Feed(lease time.Duration, types ...string) {
	ctx, cancel := context.WithCancel(w.ctx())
	conn, ended := w.Connect(), make(chan struct{})
	caps := map[string]int{}
	for _, typ := range types {
		caps[typ] = 1 << 30
	}
	go func() {
		defer close(ended)
		for redisx.Sleep(ctx, 2*time.Millisecond) == nil {
			for _, p := range w.Space.All() {
				for _, typ := range types {
					_, _ = ledger.Admit(ctx, conn.Cmd, p, ledger.AdmitArgs{
						Type:        typ,
						Most:        200,
						Cap:         1 << 30,
						Limit:       ledger.Limit{Window: time.Second},
						Seed:        "0badcafe",
						LaneWeights: [3]int{6, 3, 1},
					})
					_, _ = ledger.Reclaim(ctx, conn.Cmd, p, typ, lease, 100, 5)
				}
				_, _ = ledger.Promote(ctx, conn.Cmd, p, ledger.PromoteArgs{
					Most:     200,
					Limit:    ledger.Limit{Window: time.Second},
					Seed:     "0badcafe",
					FullWait: time.Millisecond,
					Caps:     caps,
				})
			}
		}
	}()
	w.T.Cleanup(func() { cancel(); <-ended })
}

// Decode reads JSON.
func Decode[T any](t testing.TB, text string) T {
	t.Helper()
	var v T
	require.NoError(t, json.Unmarshal([]byte(text), &v), text)
	return v
}
