package groups_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// served publishes the heartbeats of a worker process that serves these types, and of a process of
// each other role; the processes count as alive for some seconds.
func served(w *stagetest.World, types ...string) {
	w.T.Helper()
	for _, role := range []string{"fetcher", "dispatcher", "aggregator", "watcher"} {
		require.NoError(w.T, presence.PublishStage(context.WithoutCancel(stagetest.Trusted(w.T)), w.Conn, w.Space, api.StageStatus{ID: role, Role: role}))
	}
	require.NoError(w.T, presence.PublishWorker(context.WithoutCancel(stagetest.Trusted(w.T)), w.Conn, w.Space, presence.WorkerReport{
		WorkerStatus: api.WorkerStatus{ID: "w", Types: types}}))
}

// job publishes the heartbeat of a worker process that serves T and U, and then reads a job.
func job(w *stagetest.World, group string, ordinal int64) api.Job {
	w.T.Helper()
	served(w, "T", "U")
	return w.Job(group, ordinal)
}

// whyOf publishes the heartbeat of a worker process that serves T and U, and then returns the
// explanation of a group's next job.
func whyOf(w *stagetest.World, group string) api.Why {
	w.T.Helper()
	served(w, "T", "U")
	why, err := w.Store.Why(context.WithoutCancel(stagetest.Trusted(w.T)), group)
	require.NoError(w.T, err)
	require.NotEmpty(w.T, why.Detail)
	return why
}

// back reports a job with this outcome, as its worker would; the job is due again after delay.
func back(w *stagetest.World, h stagetest.Held, kind ledger.OutcomeKind, delay time.Duration) {
	w.T.Helper()
	r, err := ledger.Outcome(context.WithoutCancel(stagetest.Trusted(w.T)), w.Conn.Cmd, w.P, h.Type, ledger.Congestion{Cap: 10 * time.Hour}, []ledger.GroupOutcome{{Group: h.Group, Others: []ledger.OtherJob{{
		Entry: h.Entry, Ordinal: h.Ordinal, Attempt: h.Attempt, Kind: kind, Waits: h.Waits, Queued: []byte(h.Queued), Delay: delay, Code: "BUSY", Text: "later"}}}})
	require.NoError(w.T, err)
	require.EqualValues(w.T, 1, r.Owned)
}

func TestWhyFairness(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Submit(messages.SubmitGroup{ID: "small", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(3)})
		w.Submit(messages.SubmitGroup{ID: "large", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(150)})
		w.Submit(messages.SubmitGroup{ID: "other", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(9)})
		for group, c := range map[string]struct{ ordinal, position int64 }{"small": {2, 2}, "large": {99, 3 + 99}, "other": {8, 8}} {
			j := job(w, group, c.ordinal)
			require.Equal(w.T, "waiting", j.State)
			require.Equal(w.T, api.WhyFairness, j.Waiting, j.Why.Detail)
			require.Equal(w.T, j.ID, j.Why.Job)
			require.Equal(w.T, c.position, *j.Why.Position, group)
			require.Nil(w.T, j.Until)
			require.Nil(w.T, j.Why.EstimateSeconds, "nothing has run yet")
		}
		why := whyOf(w, "large")
		require.Equal(w.T, "large.0", why.Job)
		require.EqualValues(w.T, 3, *why.Position)
		require.Equal(w.T, "It waits for its turn among the tenants; 3 jobs of its tenant come before it, of 1 group beside its own.", why.Detail)
	})
}

// TestWhyFairnessOfSeveralTypes: the position of a job counts only jobs of its own type before it.
// It is exact, also after the first jobs were dequeued.
func TestWhyFairnessOfSeveralTypes(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	jobs := stagetest.Numbered(101)
	for i := 1; i < len(jobs); i += 2 {
		jobs[i].Type = "U"
	}
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
	_, err := ledger.Admit(stagetest.Trusted(t), w.Conn.Cmd, w.P, ledger.AdmitArgs{
		Type: "U", Most: 10, Cap: 1 << 30, Meter: ledger.Meter{Window: time.Second}, Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1}})
	require.NoError(t, err)
	require.EqualValues(t, 40, *job(w, "g", 80).Why.Position)
	require.EqualValues(t, 30, *job(w, "g", 81).Why.Position)
	require.Equal(t, "ready", job(w, "g", 1).State)
	served(w, "T")
	require.Equal(t, api.WhyFairness, w.Job("g", 80).Waiting)
	require.Equal(t, api.WhyNoProcessor, w.Job("g", 81).Waiting)
	require.Equal(t, api.WhyNoProcessor, w.Job("g", 1).Waiting)
	w.Jobs("lower", "t", 1)
	require.Contains(t, whyOf(w, "lower").Detail, "No live worker serves the type t: start one. Did you mean T? ")
}

// TestWhyFairnessOutOfOrder: jobs that a retry has requeued are not in the order of ordinals; here
// the queue is reversed. The position of a job is its place in the queue, or counted from the
// states.
func TestWhyFairnessOutOfOrder(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 20)
	queue := w.P.Queue("g", "T")
	blobs, err := w.Conn.Cmd.LRange(stagetest.Trusted(t), queue, 0, -1).Result()
	require.NoError(t, err)
	require.NoError(t, w.Conn.Cmd.Del(stagetest.Trusted(t), queue).Err())
	for i := range blobs {
		require.NoError(t, w.Conn.Cmd.LPush(stagetest.Trusted(t), queue, blobs[i]).Err())
	}
	for ordinal := range int64(20) {
		j := job(w, "g", ordinal)
		require.Equal(t, api.WhyFairness, j.Waiting)
		require.Contains(t, []int64{ordinal, 19 - ordinal}, *j.Why.Position)
	}
}

func TestWhyByPriority(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	alpha := 10_000.0
	require.NoError(t, ledger.SetPolicy(stagetest.Trusted(t), w.Conn.Cmd, w.P, &alpha))
	w.Submit(messages.SubmitGroup{ID: "first", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(7)})
	w.Submit(messages.SubmitGroup{ID: "last", Tenant: "acme", Type: "T", BasePriority: -1e12, Jobs: stagetest.Numbered(3)})
	j := job(w, "last", 1)
	require.Equal(t, api.WhyFairness, j.Waiting)
	require.EqualValues(t, 7+1, *j.Why.Position, "groups of other tenants count too")
	require.EqualValues(t, 0, *whyOf(w, "first").Position)
}

func TestWhyReady(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 5)
		w.Admit("T")
		require.EqualValues(w.T, 3, *job(w, "g", 3).Why.Position, "no worker has read anything")
		w.Take("T", "c", 2)
		j := job(w, "g", 4)
		require.Equal(w.T, "ready", j.State)
		require.Equal(w.T, api.WhyFairness, j.Waiting)
		require.EqualValues(w.T, 2, *j.Why.Position, "two of those before it are running")
		require.Equal(w.T, "It is ready and waits for a free worker, behind 2 others.", j.Why.Detail)
		why := whyOf(w, "g")
		require.Equal(w.T, "g.2", why.Job)
		require.EqualValues(w.T, 0, *why.Position)

		running := job(w, "g", 0)
		require.Equal(w.T, "in_flight", running.State)
		require.Empty(w.T, running.Waiting)
		require.Nil(w.T, running.Why)
	})
}

// TestWhyUnowned: a job in flight and a ready job, whose entries no consumer owns, are neither
// running nor waiting for a worker: the explanation says that no worker owns them.
func TestWhyUnowned(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		w.Jobs("g", "T", 2)
		w.Admit("T")
		w.Take("T", "gone", 1)
		require.NotContains(w.T, job(w, "g", 1).Why.Detail, "no worker owns it")
		_, err := w.Conn.Cmd.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: keyspace.GroupWorkers, Consumer: "gone", Streams: []string{w.P.Ready("T"), ">"}, Block: -1}).Result()
		require.NoError(w.T, err)
		require.NoError(w.T, w.Conn.Cmd.XGroupDelConsumer(ctx, w.P.Ready("T"), keyspace.GroupWorkers, "gone").Err())
		for ordinal := range int64(2) {
			_, why, err := groups.ExplainJob(w.Store, ctx, w.P, "g", ordinal, nil)
			require.NoError(w.T, err)
			require.Contains(w.T, why.Detail, "no worker owns it")
		}
	})
}

func TestWhyReadyBehindOtherGroups(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)}, now)
	require.NoError(t, err)
	w.Admit("T")
	w.Jobs("between", "T", 3)
	w.Admit("T")
	require.NoError(t, w.Store.Append(stagetest.Trusted(t), "g", stagetest.Numbered(1), "r", now))
	w.Admit("T")
	w.Take("T", "c", 1)
	why := whyOf(w, "g")
	require.Equal(t, "g.1", why.Job)
	require.EqualValues(t, 3, *why.Position)
}

func TestWhyNonReady(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 5)
		w.Admit("T")
		held := w.Take("T", "c", 5)
		back(w, held[4], ledger.OutcomeDeferred, 3*time.Hour)
		back(w, held[0], ledger.OutcomeRetry, time.Hour)
		back(w, held[1], ledger.OutcomeThrottled, 2*time.Hour)
		back(w, held[2], ledger.OutcomeReleased, 0)
		for ordinal, c := range map[int64]struct {
			reason, detail string
			hours          float64
		}{
			0: {api.WhyRetry, `^Its last attempt did not succeed \(BUSY\): its next attempt is at 20`, 1},
			1: {api.WhyCongestion, `^A downstream API asked to wait \(BUSY\): its next attempt is at 20`, 2},
			4: {api.WhyResource, `^Something that it needs is busy \(later\): its next attempt is at 20`, 3},
			2: {api.WhyRetry, `^Its last attempt did not succeed: it is due and waits for a permit and for free capacity in the ready stream\.$`, 0},
		} {
			j := job(w, "g", ordinal)
			require.Equal(w.T, "non_ready", j.State)
			require.Equal(w.T, c.reason, j.Waiting)
			require.Regexp(w.T, c.detail, j.Why.Detail)
			require.Equal(w.T, j.Until, j.Why.Until)
			if c.hours == 0 {
				require.Nil(w.T, j.Until, "a time in the past says nothing")
				require.Nil(w.T, j.Why.EstimateSeconds, "no speed is known")
				require.EqualValues(w.T, 0, *j.Why.Position)
				continue
			}
			require.InDelta(w.T, c.hours*3600, *j.Why.EstimateSeconds, 60)
		}
		why := whyOf(w, "g")
		require.Equal(w.T, "g.2", why.Job, "the first that is due")
		require.Equal(w.T, api.WhyRetry, why.Reason)

		w.Jobs("busy", "T", 1)
		w.Admit("T")
		back(w, w.Take("T", "c", 1)[0], ledger.OutcomeDeferred, time.Hour)
		require.Regexp(w.T, `^Something that it needs is busy \(later\): `, whyOf(w, "busy").Detail)

		stagetest.SetLastError(w.T, w.Conn.Cmd, w.P, "g", 0, `{"code":"BUSY","until":1,"reason":"A"}`)
		require.Equal(w.T, api.WhyRetry, job(w, "g", 0).Waiting, "an error record whose time has passed says nothing: the job is searched for")
		served(w)
		require.Equal(w.T, api.WhyNoProcessor, w.Job("g", 1).Waiting)
	})
}

// TestWhyAmongManyNonReadyJobs: a job is found among 6,000 non-ready jobs of its tenant, and its
// explanation has the right due time.
func TestWhyAmongManyNonReadyJobs(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 3000
	later := time.Now().Add(time.Hour)
	for g := range 2 {
		jobs := stagetest.Numbered(n)
		for i := range jobs {
			jobs[i].RunAt = &later
		}
		w.Submit(messages.SubmitGroup{ID: fmt.Sprint("g", g), Tenant: "acme", Type: "T", Jobs: jobs})
	}
	for _, ordinal := range []int64{0, 1, 1234, n - 1} {
		j := job(w, "g1", ordinal)
		require.Equal(t, api.WhyScheduled, j.Waiting)
		require.Equal(t, later.UnixMilli(), j.Until.UnixMilli())
	}
	// A job that is at no location is just being moved: the answer gives no reason, and says that
	// the job is on its way.
	require.NoError(t, w.Conn.Cmd.Del(stagetest.Trusted(t), w.P.NonReadyOf("acme")).Err())
	j := job(w, "g1", 5)
	require.Equal(t, "non_ready", j.State)
	require.Empty(t, j.Waiting)
	require.Contains(t, j.Why.Detail, "on its way")
}

func TestWhyScheduled(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		later := time.Now().Add(time.Hour)
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", RunAt: &later, Jobs: stagetest.Numbered(2)})
		j := job(w, "g", 1)
		require.Equal(w.T, api.WhyScheduled, j.Waiting)
		require.Equal(w.T, later.UnixMilli(), j.Until.UnixMilli())
		require.InDelta(w.T, 3600, *j.Why.EstimateSeconds, 60)
		served(w)
		require.Equal(w.T, api.WhyScheduled, w.Job("g", 1).Waiting, "checked before the missing worker")
		require.Equal(w.T, api.WhyScheduled, whyOf(w, "g").Reason)
	})
}

func TestWhyRate(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	m := ledger.Meter{Window: time.Hour, Limiter: ledger.LimiterFixed}
	w.Limit(m, 2, ledger.ShareStatic)
	permits := m.PerWindow(2)
	w.Jobs("g", "T", int(permits)+10)
	admit := func() ledger.AdmitReply {
		r, err := ledger.Admit(stagetest.Trusted(t), w.Conn.Cmd, w.P, ledger.AdmitArgs{
			Type: "T", Most: 200, Cap: 1 << 30, Meter: m, Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1}})
		require.NoError(t, err)
		return r
	}
	for admit().Moved > 0 {
	}
	c := w.Counts("g")
	require.Equal(t, permits, c.Ready)
	j := job(w, "g", permits+9)
	require.Equal(t, "waiting", j.State)
	require.Equal(t, api.WhyRate, j.Waiting, j.Why.Detail)
	require.True(t, j.Until.After(time.Now()))
	require.EqualValues(t, permits, j.Why.Limit.PerWindow)
	require.EqualValues(t, permits, j.Why.Limit.Used)
	require.InDelta(t, 2, j.Why.Limit.RPS, 0.01)
	require.EqualValues(t, 3600_000, j.Why.Limit.WindowMS)
	require.NotNil(t, j.Why.Position)
	require.Equal(t, api.WhyRate, whyOf(w, "g").Reason)
	require.Equal(t, "global", j.Why.Limit.Scope, "the only active tenant has all of it")

	// A permit is reserved for the marker.
	marker := job(w, "g", permits)
	require.Equal(t, c.NonReady == 1, marker.State == "non_ready")
	require.Equal(t, api.WhyRate, marker.Waiting)
	require.NotNil(t, marker.Why.Limit)

	// Another tenant has its share left, but the global limit has no permit.
	w.Submit(messages.SubmitGroup{ID: "h", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(1)})
	other := job(w, "h", 0)
	require.Equal(t, api.WhyRate, other.Waiting)
	require.Equal(t, "global", other.Why.Limit.Scope)
	require.Contains(t, other.Why.Detail, "All tenants together have used up the limit of 2 a second: the next permit")
}

func TestWhyPaused(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		later := time.Now().Add(time.Hour)
		jobs := stagetest.Numbered(3)
		jobs[2].RunAt = &later
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
		require.NoError(w.T, w.Store.PauseTenant(ctx, "acme"))
		for _, ordinal := range []int64{1, 2} {
			j := job(w, "g", ordinal)
			require.Equal(w.T, api.WhyPaused, j.Waiting)
			require.Equal(w.T, []string{"tenant"}, j.Why.PausedBy)
			require.Equal(w.T, "Paused: tenant acme. It goes on when that is resumed.", j.Why.Detail)
		}
		_, err := w.Store.Pause(ctx, "g")
		require.NoError(w.T, err)
		require.NoError(w.T, w.Store.PauseType(ctx, "T"))
		all := job(w, "g", 2).Why
		require.Equal(w.T, []string{"group", "tenant", "type"}, all.PausedBy)
		require.Equal(w.T, "Paused: group g and tenant acme and type T. It goes on when all of them are resumed.", all.Detail)
		require.Equal(w.T, []string{"group", "tenant", "type"}, whyOf(w, "g").PausedBy)
		served(w)
		require.Equal(w.T, api.WhyPaused, w.Job("g", 0).Waiting, "checked before the missing worker")

		require.NoError(w.T, w.Store.ResumeTenant(ctx, "acme"))
		require.NoError(w.T, w.Store.ResumeType(ctx, "T"))
		require.Equal(w.T, []string{"group"}, job(w, "g", 0).Why.PausedBy)
		_, err = w.Store.Resume(ctx, "g")
		require.NoError(w.T, err)
		require.Equal(w.T, api.WhyFairness, job(w, "g", 0).Waiting)
		require.Equal(w.T, api.WhyScheduled, job(w, "g", 2).Waiting)
	})
}

func TestWhyNoJobWaits(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 2)
	w.Admit("T")
	held := w.Take("T", "c", 2)
	for _, c := range []struct {
		then func()
		says string
	}{
		{func() {}, "the last 2 are running"},
		{func() { w.Done("1", held[0]) }, "the last one is running"},
		{func() { w.Fail("BOOM", held[1]) }, "seal it with POST /v1/groups/g/seal or `bulkaction seal g`"},
	} {
		c.then()
		why := whyOf(w, "g")
		require.Empty(t, why.Reason)
		require.Contains(t, why.Detail, c.says)
	}
	_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "open", Tenant: "acme", Type: "T"}, now)
	require.NoError(t, err)
	require.Contains(t, whyOf(w, "open").Detail, "not sealed")
	_, err = w.Store.Cancel(stagetest.Trusted(t), "open")
	require.NoError(t, err)
	require.Equal(t, "The group has ended: it is CANCELLED.", whyOf(w, "open").Detail)
	_, err = w.Store.Why(stagetest.Trusted(t), "nobody")
	require.ErrorIs(t, err, api.ErrNotFound)
	for _, ordinal := range []int64{0, 1} {
		require.Nil(t, w.Job("g", ordinal).Why)
	}
}

// TestWhyWhileJobsMove: jobs move all the time while the explainer reads them: each explanation
// must fit the state that it is returned with.
func TestWhyWhileJobsMove(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 400
	w.Jobs("g", "T", n)
	w.Feed(time.Minute, "T")
	moved := make(chan struct{})
	go func() {
		defer close(moved)
		for range n / 4 {
			held := w.Take("T", "c", 4)
			back(w, held[0], ledger.OutcomeRetry, 0)
			w.Done("1", held[1:]...)
		}
	}()
	fits := map[string][]string{
		"waiting": {api.WhyFairness, ""}, "ready": {api.WhyFairness, ""}, "non_ready": {api.WhyRetry, ""},
		"in_flight": {""}, "done": {""},
	}
	asked := 0
	for i := int64(0); ; i++ {
		select {
		case <-moved:
			require.Positive(t, asked)
			return
		default:
		}
		j := job(w, "g", i*7%n)
		require.Contains(t, fits[j.State], j.Waiting, j.State)
		asked++
	}
}

// TestReadyWithoutPermission: if no worker can get a permission for a ready job of a gated type,
// the explanation names the resource, and the earliest time at which a worker may get one.
func TestReadyWithoutPermission(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 1)
	w.Admit("T")
	until := time.Now().Add(time.Hour).Truncate(time.Second)
	publish := func(id string, permission time.Time) {
		require.NoError(t, presence.PublishWorker(stagetest.Trusted(t), w.Conn, w.Space, presence.WorkerReport{
			WorkerStatus: api.WorkerStatus{ID: id, Types: []string{"T"}, SeenAt: time.Now()}, NoPermissionUntil: map[string]time.Time{"T": permission},
		}))
	}
	publish("a", until)
	publish("b", until.Add(time.Hour))
	why, err := w.Store.Why(stagetest.Trusted(t), "g")
	require.NoError(t, err)
	require.Equal(t, api.WhyResource, why.Reason)
	require.True(t, until.Equal(*why.Until))
	require.Contains(t, why.Detail, "what its type needs is busy until ")

	publish("b", time.Now().Add(-time.Second)) // b gets one now
	why, err = w.Store.Why(stagetest.Trusted(t), "g")
	require.NoError(t, err)
	require.Equal(t, api.WhyFairness, why.Reason)
}

// hourly gives w a store with a global limit of 3,600 permits an hour. The function that it returns
// admits jobs of type T in the partition w.P until no permit is left for them.
func hourly(w *stagetest.World, share string) func() {
	w.T.Helper()
	m := ledger.Meter{Window: time.Hour, Limiter: ledger.LimiterFixed}
	w.Limit(m, 1, share)
	return func() {
		w.T.Helper()
		for moved := 1; moved > 0; {
			r, err := ledger.Admit(stagetest.Trusted(w.T), w.Conn.Cmd, w.P, ledger.AdmitArgs{
				Type: "T", Most: 200, Cap: 1 << 30, Meter: m, Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1}})
			require.NoError(w.T, err)
			moved = int(r.Moved)
		}
	}
}

func TestWhyShare(t *testing.T) {
	t.Parallel()
	for _, share := range []string{ledger.ShareStatic, ledger.ShareElastic} {
		w := stagetest.Shared(t)
		spend := hourly(w, share)
		w.Submit(messages.SubmitGroup{ID: "h", Tenant: "globex", Type: "U", Jobs: stagetest.Numbered(3600)}) // it leaves its share
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(3700)})
		require.Equal(t, api.WhyFairness, job(w, "g", 3699).Waiting, "its share is not used yet")
		spend()
		require.EqualValues(t, 1800, w.Counts("g").Ready)
		j := job(w, "g", 3699)
		require.Equal(t, api.WhyRate, j.Waiting, j.Why.Detail)
		require.Equal(t, "share", j.Why.Limit.Scope)
		require.EqualValues(t, 1800, j.Why.Limit.PerWindow)
		require.True(t, j.Until.After(time.Now()))
		require.Contains(t, j.Why.Detail, "Its tenant acme has used up its share of 0.5 a second among 2 active tenants: the next permit comes at 2")
		require.Equal(t, api.WhyFairness, job(w, "h", 0).Waiting)

		rps := 0.25
		require.NoError(t, ledger.SetTenant(stagetest.Trusted(t), w.Conn.Cmd, w.P, "acme", ledger.TenantSettings{RPS: &rps}))
		j = job(w, "g", 3699)
		require.Equal(t, api.WhyRate, j.Waiting, j.Why.Detail)
		require.Equal(t, "tenant", j.Why.Limit.Scope)
		require.Contains(t, j.Why.Detail, "Its tenant acme has used up its own limit of 0.25 a second: the next")
	}
}

// TestWhyPartOfTheLimit: one of two partitions has half of the global limit: 1,800 permits an hour.
// The explanation of a job names them, and the limit of all partitions.
func TestWhyPartOfTheLimit(t *testing.T) {
	w := stagetest.Parallel(t, 2)
	spend := hourly(w, ledger.ShareElastic)
	w.P = w.Space.OfTenant("acme")
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1900)})
	spend()
	require.EqualValues(t, 1800, w.Counts("g").Ready)
	j := job(w, "g", 1899)
	require.Equal(t, api.WhyRate, j.Waiting, j.Why.Detail)
	require.Equal(t, "global", j.Why.Limit.Scope)
	require.EqualValues(t, 1800, j.Why.Limit.PerWindow)
	require.InDelta(t, 1, j.Why.Limit.RPS, 0.001, "of all partitions")
	require.Contains(t, j.Why.Detail, "The limit is 1 a second for all tenants; its partition has 1800 of a window's 3600, all used: the next permit comes at 2")
}
