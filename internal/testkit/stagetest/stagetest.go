// Package stagetest is the environment in which a stage is tested: an installation on a Redis. A
// test submits groups to it, acts in place of the other roles, and reads the state of the jobs.
// Each read of a group's counts checks them against the states of its jobs.
package stagetest

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/reducer"
)

// Patience is the time limit for events that must happen; a healthy run needs a fraction of it.
const Patience = 30 * time.Second

// Installation is a Redis with a key prefix, connections and a store, and the roles that a test
// runs on it. A method that fails ends the test.
type Installation struct {
	T     testing.TB
	URL   string
	Conn  *redisx.Conn
	Space keyspace.Space
	P     keyspace.Partition // the first partition
	Tel   *telemetry.Telemetry
	Store *groups.Store
}

// World is an installation whose jobs the test submits, moves and reads. A method that fails ends
// the test.
type World struct{ Installation }

// New returns an installation with this number of partitions on the Redis at url.
func New(t testing.TB, url, prefix string, partitions int) *World {
	t.Helper()
	w := &World{Installation{T: t, URL: url, Tel: telemetry.Nop()}}
	w.Conn = w.Connect()
	var err error
	w.Space, err = keyspace.New(prefix, partitions)
	require.NoError(t, err)
	w.Space.SetLayout(ledger.Layout.Newest)
	for _, p := range w.Space.All() {
		limittest.Use(w.ctx(), t, w.Conn.Cmd, p, limittest.None)
	}
	w.P = w.Space.Partition(0)
	w.Store = w.NewStore(groups.Config{KeepIdempotencyKeys: time.Hour})
	return w
}

// Shared returns an installation with one partition on the redis-server that the tests of the
// package share.
func Shared(t testing.TB) *World {
	t.Helper()
	url, prefix := redistest.Shared(t)
	return New(t, url, prefix, 1)
}

// Parallel is [Shared] with a number of partitions, for a test that runs in parallel with others.
func Parallel(t *testing.T, partitions int) *World {
	t.Helper()
	url, prefix := redistest.Parallel(t)
	return New(t, url, prefix, partitions)
}

// Both runs a test on a real server and on miniredis, in parallel with other tests.
func Both(t *testing.T, test func(*World)) {
	t.Helper()
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		test(New(t, url, prefix, 1))
	})
}

// Connect opens another connection, like another process.
func (w *Installation) Connect() *redisx.Conn {
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

// NewStore returns another store on the installation.
func (w *Installation) NewStore(cfg groups.Config) *groups.Store {
	return groups.New(cfg, w.Conn, w.Space, w.Tel, reducer.NewRegistry(), nil)
}

// ctx returns a context that may use the store and is not cancelled at the end of the test, so that
// clean-ups can use it.
func (w *Installation) ctx() context.Context { return context.WithoutCancel(Trusted(w.T)) }

// Trusted returns the test's context with the right to use the store without an API key.
func Trusted(t testing.TB) context.Context { return auth.Trust(t.Context()) }

// Run runs a role in the background until stop is called, at the latest until the end of the test.
// stop waits until the role has ended, which must be without an error and within Patience.
func (w *Installation) Run(role interface{ Run(context.Context) error }) (stop func()) {
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

// Await calls ok repeatedly until it returns true, for states that no event announces. The test
// fails after Patience.
func (w *Installation) Await(what string, ok func() bool) {
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

// Pending returns how many entries of a stream are delivered and not acknowledged.
func (w *Installation) Pending(stream, group string) int64 {
	w.T.Helper()
	p, err := w.Conn.Cmd.XPending(w.ctx(), stream, group).Result()
	require.NoError(w.T, err)
	return p.Count
}

// ensure creates a consumer group unless it exists.
func (w *Installation) ensure(stream, group string) {
	w.T.Helper()
	if err := w.Conn.Cmd.XGroupCreateMkStream(w.ctx(), stream, group, "0").Err(); err != nil {
		require.ErrorContains(w.T, err, "BUSYGROUP")
	}
}

// Receive waits for a value from a channel. The test fails after Patience.
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

// Jobs stores a sealed group of tenant acme with n jobs; the payload of each is its number.
func (w *World) Jobs(group, typ string, n int) {
	w.T.Helper()
	w.Submit(messages.SubmitGroup{ID: group, Tenant: "acme", Type: typ, Jobs: Numbered(n)})
}

// Numbered returns n jobs; the payload of each is its number.
func Numbered(n int) []messages.Job {
	jobs := make([]messages.Job, n)
	for i := range jobs {
		jobs[i].Payload = fmt.Appendf(nil, `%d`, i)
	}
	return jobs
}

// Admit admits the waiting jobs of a type in all partitions, like a fetcher without a rate limit.
func (w *World) Admit(typ string) {
	w.T.Helper()
	for _, p := range w.Space.All() {
		for {
			r, err := ledger.Admit(w.ctx(), w.Conn.Cmd, p, unlimited(typ))
			require.NoError(w.T, err)
			if r.Moved == 0 {
				break
			}
		}
	}
}

// unlimited returns the arguments of the script admit for a fetcher without a rate limit.
func unlimited(typ string) ledger.AdmitArgs {
	return ledger.AdmitArgs{
		Type:        typ,
		Most:        200,
		Cap:         1 << 30,
		Meter:       limittest.None.Meter,
		Seed:        "0badcafe",
		LaneWeights: [3]int{6, 3, 1},
	}
}

// Limit divides a global limit of rps permits a second evenly among the partitions, and makes w.Store
// count as it does.
func (w *World) Limit(m ledger.Meter, rps int64, share string) {
	w.T.Helper()
	l, n := limittest.Limit{Meter: m, Permits: m.PerWindow(rps), Share: share}, int64(w.Space.Partitions())
	for _, p := range w.Space.All() {
		i := int64(p.Index())
		l.Part = l.Permits*(i+1)/n - l.Permits*i/n
		limittest.Use(w.ctx(), w.T, w.Conn.Cmd, p, l)
	}
	w.Store = w.NewStore(groups.Config{Meter: m, Configured: api.ConfiguredLimits{RPS: rps, Share: share}})
}

// Feed acts like a fetcher and a dispatcher without rate limits until the end of the test: it
// admits waiting jobs, promotes due jobs, and reclaims jobs whose lease has ended. It ignores
// errors, because Redis may be away in the test.
func (w *World) Feed(lease time.Duration, types ...string) {
	ctx, cancel := context.WithCancel(w.ctx())
	conn, ended := w.Connect(), make(chan struct{})
	go func() {
		defer close(ended)
		for redisx.Sleep(ctx, 2*time.Millisecond) == nil {
			for _, p := range w.Space.All() {
				for _, typ := range types {
					_, _ = ledger.Admit(ctx, conn.Cmd, p, unlimited(typ))
					_, _ = ledger.Reclaim(ctx, conn.Cmd, p, typ, lease, 100, 5, false)
				}
				_, _ = ledger.Promote(ctx, conn.Cmd, p, ledger.PromoteArgs{
					Most:     200,
					Meter:    limittest.None.Meter,
					Seed:     "0badcafe",
					FullWait: time.Millisecond,
					Cap:      1 << 30,
				})
			}
		}
	}()
	w.T.Cleanup(func() { cancel(); <-ended })
}

// Decode parses JSON.
func Decode[T any](t testing.TB, text string) T {
	t.Helper()
	var v T
	require.NoError(t, json.Unmarshal([]byte(text), &v), text)
	return v
}

// Process returns the stage.Process with which a test runs a role of the installation: with a
// connection of its own, and the name id.
func Process(w *World, id string) stage.Process {
	w.T.Helper()
	return stage.Process{ID: id, Conn: w.Connect(), Space: w.Space, Tel: w.Tel}
}
