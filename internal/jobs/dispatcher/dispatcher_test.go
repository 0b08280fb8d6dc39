package dispatcher_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/dispatcher"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func config() dispatcher.Config {
	return dispatcher.Config{
		Interval: 20 * time.Millisecond, BatchSize: 10, FetchBatch: 50, ReadyCap: 1000,
		Meter: ledger.Meter{Window: time.Second}, Lease: stagetest.Patience, MaxLosses: 5,
	}
}

func TestDueJobsArePromoted(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		due := time.Now().Add(300 * time.Millisecond).Truncate(time.Millisecond)
		jobs := stagetest.Numbered(25)
		for i := range jobs {
			jobs[i].RunAt = &due
		}
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
		cfg, batches := config(), make(chan int64, 25)
		cfg.OnPermits = func(_ int64, _ int, permits []ledger.Permit) {
			for _, p := range permits {
				batches <- p.N
			}
		}
		d := dispatcher.New(stagetest.Process(w, "d"), cfg)
		stop := w.Run(d)
		w.AwaitCounts("g", api.Counts{Accepted: 25, Ready: 25})
		ctx := context.WithoutCancel(w.T.Context())
		first, err := w.Conn.Cmd.XRangeN(ctx, w.P.Ready("T"), "-", "+", 1).Result()
		require.NoError(w.T, err)
		require.GreaterOrEqual(w.T, first[0].ID, stagetest.EntryID(due))

		w.Await("the count of promoted jobs", func() bool { return d.Status().Counts["total_moved"] == 25 })
		for left := int64(25); left > 0; {
			n := <-batches
			require.LessOrEqual(w.T, n, int64(cfg.BatchSize), "one call promotes at most a batch")
			left -= n
		}
		cycles := d.Status().Counts["total_cycles"]
		require.Positive(w.T, cycles)
		w.Await("further cycles to be counted", func() bool { return d.Status().Counts["total_cycles"] >= cycles+2 })
		st := d.Status()
		require.True(w.T, st.Running)
		require.Zero(w.T, st.Counts["total_skipped"])
		w.Await("the status to be published", func() bool {
			all, err := presence.Stages(ctx, w.Conn, w.Space)
			return err == nil && len(all) == 1 && all[0].Role == "dispatcher" && all[0].Counts["total_moved"] == 25
		})
		stop()
		require.False(w.T, d.Status().Running)
	})
}

// TestNewDueTimeWakesTheDispatcher: 20 jobs are submitted one after the other, each due 20 ms
// later. They are promoted within half a second on average, although the interval is a minute.
func TestNewDueTimeWakesTheDispatcher(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	cfg := config()
	cfg.Interval = time.Minute
	w.Run(dispatcher.New(stagetest.Process(w, "d"), cfg))
	began := time.Now()
	const rounds = 20
	for i, n := 0, 0; n < rounds; i++ {
		require.Less(t, i, 10*rounds, "jobs are stored after their due time")
		due := time.Now().Add(20 * time.Millisecond)
		group := fmt.Sprint("g", i)
		w.Submit(messages.SubmitGroup{ID: group, Tenant: group, Type: "T", Jobs: []messages.Job{{Payload: []byte(`1`), RunAt: &due}}})
		if w.Counts(group).Waiting == 1 {
			continue // it was stored after its due time; nothing admits it in this test
		}
		w.AwaitCounts(group, api.Counts{Accepted: 1, Ready: 1})
		n++
	}
	require.Less(t, time.Since(began), rounds*time.Second/2)
}

// TestPauseBetweenBatches: a wake token that comes while jobs are promoted does not end the pause
// after them.
func TestPauseBetweenBatches(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		type promoted struct {
			at   int64 // µs
			jobs int
		}
		calls := make(chan promoted, 1000)
		ctx := context.WithoutCancel(w.T.Context())
		cfg := config()
		cfg.Interval = time.Minute
		cfg.OnPermits = func(at int64, _ int, permits []ledger.Permit) {
			calls <- promoted{at, len(permits)}
			if len(permits) > 0 {
				w.Conn.Cmd.LPush(ctx, w.P.Wake("dispatcher"), "1")
			}
		}
		due := time.Now().Add(300 * time.Millisecond)
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: []messages.Job{{RunAt: &due}}})
		w.Run(dispatcher.New(stagetest.Process(w, "d"), cfg))
		first := <-calls
		for first.jobs == 0 {
			first = <-calls
		}
		require.GreaterOrEqual(w.T, (<-calls).at-first.at, (14 * time.Millisecond).Microseconds())
	})
}

func TestScheduledGroupStartsAtItsTime(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		at := time.Now().Add(300 * time.Millisecond)
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", RunAt: &at, Jobs: stagetest.Numbered(3)})
		w.Run(dispatcher.New(stagetest.Process(w, "d"), config()))
		w.Await("the jobs to be ready", func() bool { w.Admit("T"); return w.Counts("g").Ready == 3 })
		require.False(w.T, time.Now().Before(at))
	})
}

// TestFullReadyStreamIsSkipped: due jobs of a full ready stream stay non-ready, and are promoted
// once the stream has free capacity.
func TestFullReadyStreamIsSkipped(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	due := time.Now().Add(50 * time.Millisecond)
	jobs := stagetest.Numbered(8)
	for i := range jobs {
		jobs[i].RunAt = &due
	}
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
	cfg := config()
	cfg.ReadyCap = 3
	d := dispatcher.New(stagetest.Process(w, "d"), cfg)
	w.Run(d)
	w.AwaitCounts("g", api.Counts{Accepted: 8, Ready: 3, NonReady: 5})
	w.Await("a job to be skipped", func() bool { return d.Status().Counts["total_skipped"] > 0 })
	w.Take("T", "c", 3)
	w.AwaitCounts("g", api.Counts{Accepted: 8, InFlight: 3, Ready: 3, NonReady: 2})
}

func TestJobsOfADeadWorkerAreReclaimedAfterTheLease(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 5)
	w.Admit("T")
	const lease = 700 * time.Millisecond
	dead := w.Take("T", "dead", 3)
	alive := w.Take("T", "alive", 2)
	cfg := config()
	cfg.Lease = lease
	d := dispatcher.New(stagetest.Process(w, "d"), cfg)
	w.Run(d)
	// One worker renews its leases, the other one is dead.
	w.Await("the jobs to be reclaimed", func() bool {
		jobs := []ledger.Held{}
		for _, j := range alive {
			jobs = append(jobs, ledger.Held{Entry: j.Entry, Group: j.Group, Ordinal: j.Ordinal, Attempt: j.Attempt})
		}
		lost, err := ledger.Renew(t.Context(), w.Conn.Cmd, w.P, "T", "alive", jobs)
		require.NoError(t, err)
		require.Empty(t, lost)
		return w.Counts("g") == api.Counts{Accepted: 5, InFlight: 2, Ready: 3}
	})
	w.Await("the count of reclaimed jobs", func() bool { return d.Status().Counts["taken_back"] == 3 })
	for _, j := range dead {
		seen := w.Job("g", j.Ordinal)
		require.Equal(t, "WORKER_LOST", seen.LastError.Code)
		require.GreaterOrEqual(t, seen.LastError.At.Sub(j.At), lease-50*time.Millisecond) // Redis's clock counts ms, and this process has another clock
	}
	for _, j := range w.Take("T", "next", 3) {
		require.Equal(t, 2, j.Attempt)
		require.Equal(t, 1, j.Losses)
	}
}

// TestEntriesThatNobodyOwnsAreReclaimed: after XGROUP DELCONSUMER and XGROUP SETID, five delivered
// entries are in no pending list. Four jobs become ready again; the fifth, whose worker renews its
// lease, stays in flight.
func TestEntriesThatNobodyOwnsAreReclaimed(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 5)
	w.Admit("T")
	w.Take("T", "dead", 2)
	alive := w.Take("T", "alive", 1)[0]
	ready := w.P.Ready("T")
	for _, consumer := range []string{"dead", "alive"} {
		require.NoError(t, w.Conn.Cmd.XGroupDelConsumer(t.Context(), ready, keyspace.GroupWorkers, consumer).Err())
	}
	require.NoError(t, w.Conn.Cmd.XGroupSetID(t.Context(), ready, keyspace.GroupWorkers, "$").Err())
	require.Zero(t, w.Pending(ready, keyspace.GroupWorkers))

	cfg := config()
	cfg.Lease = 2 * time.Second // a renewal must come in time on a busy machine, too
	w.Run(dispatcher.New(stagetest.Process(w, "d"), cfg))
	w.Await("the jobs to be reclaimed", func() bool {
		held := ledger.Held{Entry: alive.Entry, Group: "g", Ordinal: alive.Ordinal, Attempt: alive.Attempt}
		lost, err := ledger.Renew(t.Context(), w.Conn.Cmd, w.P, "T", "alive", []ledger.Held{held})
		require.NoError(t, err)
		require.Empty(t, lost)
		return w.Counts("g") == api.Counts{Accepted: 5, InFlight: 1, Ready: 4}
	})
	w.Done(`{}`, append(w.Take("T", "next", 4), alive)...)
	require.Equal(t, api.Counts{Accepted: 5, Done: 5}, w.Counts("g"))
}

// TestLargestIDInTheReadyStream: Redis adds no entry behind one with the largest possible id, which
// here is no job. While the dispatcher runs, the ready stream takes entries again.
func TestLargestIDInTheReadyStream(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 3)
	require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
		Stream: w.P.Ready("T"), ID: "18446744073709551615-18446744073709551615", Values: []string{"j", "no job"}}).Err())
	cfg := config()
	cfg.Lease = 200 * time.Millisecond
	w.Run(dispatcher.New(stagetest.Process(w, "d"), cfg))
	w.Await("the ready stream to take entries", func() bool {
		id, err := w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.P.Ready("T"), Values: []string{"j", "no job"}}).Result()
		return err == nil && w.Conn.Cmd.XDel(t.Context(), w.P.Ready("T"), id).Err() == nil
	})
	w.Admit("T")
	require.Equal(t, api.Counts{Accepted: 3, Ready: 3}, w.Counts("g"))
}

func TestJobThatLosesTooManyWorkersFails(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 1)
	w.Admit("T")
	cfg := config()
	cfg.Lease, cfg.MaxLosses = 100*time.Millisecond, 2
	tel, err := telemetry.Setup(t.Context(), telemetry.Options{Service: "dispatcher", LogWriter: io.Discard})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, tel.Shutdown(context.Background())) })
	w.Tel = tel
	d := dispatcher.New(stagetest.Process(w, "d"), cfg)
	w.Run(d)
	for range 3 {
		w.Take("T", "dead", 1)
	}
	w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
	require.Equal(t, map[string]int64{"WORKER_LOST": 1}, w.Group("g").FailuresByCode)
	require.Equal(t, 3, w.DeadLetters()[0].Attempts)
	w.Await("the failed job to be counted", func() bool { return d.Status().Counts["worker_lost"] == 1 })
	answer := httptest.NewRecorder()
	tel.MetricsHandler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Contains(t, answer.Body.String(), `bulk_action_worker_dead_letter_total{reason="worker_lost"} 1`)
}

// TestNothingIsReclaimedForALeaseAfterAnOutage: Redis is away for longer than a lease. The worker
// renews its lease again from half a lease after the restart on, and its job is not reclaimed. When
// it stops renewing, the job is reclaimed.
func TestNothingIsReclaimedForALeaseAfterAnOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, redistest.AOF)
	w := stagetest.New(t, server.URL(), "t:", 1)
	w.Jobs("g", "T", 1)
	w.Admit("T")
	const lease = time.Second
	j := w.Take("T", "alive", 1)[0]
	cfg := config()
	cfg.Lease = lease
	d := dispatcher.New(stagetest.Process(w, "d"), cfg)
	w.Run(d)
	server.Kill()
	<-time.After(lease + lease/4)
	server.Restart()
	back := time.Now()
	// The worker renews its lease late.
	<-time.After(lease / 2)
	for time.Since(back) < 2*lease {
		lost, err := ledger.Renew(t.Context(), w.Conn.Cmd, w.P, "T", "alive", []ledger.Held{{Entry: j.Entry, Group: "g", Ordinal: 0, Attempt: 1}})
		require.NoError(t, err)
		require.Empty(t, lost)
		<-time.After(lease / 10)
	}
	require.Zero(t, d.Status().Counts["taken_back"])
	require.Equal(t, api.Counts{Accepted: 1, InFlight: 1}, w.Counts("g"))
	// Now the worker renews nothing, so its job is reclaimed.
	w.AwaitCounts("g", api.Counts{Accepted: 1, Ready: 1})
}

func TestDeadConsumersAreDropped(t *testing.T) {
	t.Parallel()
	mini, url := redistest.Mini(t)
	w := stagetest.New(t, url, "t:", 1)
	w.Jobs("g", "T", 2)
	w.Admit("T")
	mini.SetTime(time.Now().Add(-time.Hour))
	w.Take("T", "holds", 1)
	touchAndAck(w, w.P.Ready("T"), keyspace.GroupWorkers, w.Take("T", "gone", 1)[0].Entry)
	require.NoError(t, w.Conn.Cmd.XGroupCreateMkStream(t.Context(), w.P.ResultStream(), keyspace.GroupAggregator, "0").Err())
	require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.P.ResultStream(), Values: []string{"g", "g"}}).Err())
	entries, err := w.Conn.Cmd.XReadGroup(t.Context(), &redis.XReadGroupArgs{
		Group: keyspace.GroupAggregator, Consumer: "gone", Streams: []string{w.P.ResultStream(), ">"}, Block: -1}).Result()
	require.NoError(t, err)
	touchAndAck(w, w.P.ResultStream(), keyspace.GroupAggregator, entries[0].Messages[0].ID)
	mini.SetTime(time.Time{})

	cfg := config()
	cfg.Lease = 100 * time.Hour
	w.Run(dispatcher.New(stagetest.Process(w, "d"), cfg))
	consumers := func(stream, group string) (names []string) {
		all, err := w.Conn.Cmd.XInfoConsumers(t.Context(), stream, group).Result()
		require.NoError(t, err)
		for _, c := range all {
			names = append(names, c.Name)
		}
		return names
	}
	w.Await("consumers without pending entries to be removed", func() bool {
		left := consumers(w.P.Ready("T"), keyspace.GroupWorkers)
		return len(left) == 1 && left[0] == "holds" && len(consumers(w.P.ResultStream(), keyspace.GroupAggregator)) == 0
	})
}

// touchAndAck makes the consumer "gone" claim, acknowledge and delete an entry. The claim starts
// its idle time, because in miniredis a read does not.
func touchAndAck(w *stagetest.World, stream, group, entry string) {
	w.T.Helper()
	ctx := context.WithoutCancel(w.T.Context())
	require.NoError(w.T, w.Conn.Cmd.XClaim(ctx, &redis.XClaimArgs{Stream: stream, Group: group, Consumer: "gone", Messages: []string{entry}}).Err())
	require.NoError(w.T, w.Conn.Cmd.XAck(ctx, stream, group, entry).Err())
	require.NoError(w.T, w.Conn.Cmd.XDel(ctx, stream, entry).Err())
}
