package groups_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestDeadLetterFilters: the filters select among the dead letters of all partitions; pages have no
// gap and no repetition.
func TestDeadLetterFilters(t *testing.T) {
	w := stagetest.Parallel(t, 3)
	begin := time.Now().Truncate(time.Second)
	const n = 120
	for i := range n {
		at := begin.Add(time.Duration(i) * time.Second)
		tenant := fmt.Sprint("t", i%4)
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: w.Space.OfTenant(tenant).DeadLetters(), ID: stagetest.EntryID(at),
			Values: []any{
				"job", fmt.Sprint("g.", i), "at", at.UnixMilli(), "tenant", tenant, "group", fmt.Sprint("g", i%2),
				"type", fmt.Sprint("T", i%3), "code", fmt.Sprint("C", i%5), "ordinal", i,
			},
		}).Err())
	}
	jobs := func(ctx context.Context, q messages.DeadLetterQuery) (all []string, scanned int) {
		for {
			page, err := w.Store.DeadLetters(ctx, q)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page.DeadLetters), q.Limit)
			scanned += page.Scanned
			for _, d := range page.DeadLetters {
				all = append(all, d.Job)
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return all, scanned
			}
		}
	}
	for name, tt := range map[string]struct {
		q    messages.DeadLetterQuery
		want func(i int) bool
	}{
		"none":   {messages.DeadLetterQuery{}, func(int) bool { return true }},
		"tenant": {messages.DeadLetterQuery{Tenant: "t1"}, func(i int) bool { return i%4 == 1 }},
		"group":  {messages.DeadLetterQuery{Group: "g1"}, func(i int) bool { return i%2 == 1 }},
		"type":   {messages.DeadLetterQuery{Type: "T2"}, func(i int) bool { return i%3 == 2 }},
		"code":   {messages.DeadLetterQuery{Code: "C3"}, func(i int) bool { return i%5 == 3 }},
		"since":  {messages.DeadLetterQuery{Since: begin.Add(100 * time.Second)}, func(i int) bool { return i >= 100 }},
		"all of them": {
			messages.DeadLetterQuery{Tenant: "t1", Group: "g1", Type: "T0", Code: "C4", Since: begin.Add(9 * time.Second)},
			func(i int) bool { return i%4 == 1 && i%2 == 1 && i%3 == 0 && i%5 == 4 && i >= 9 },
		},
		"nothing": {messages.DeadLetterQuery{Code: "X"}, func(int) bool { return false }},
	} {
		var want []string
		for i := n - 1; i >= 0; i-- {
			if tt.want(i) {
				want = append(want, fmt.Sprint("g.", i))
			}
		}
		for _, limit := range []int{1, 7, 1000} {
			tt.q.Limit = limit
			got, scanned := jobs(stagetest.Trusted(t), tt.q)
			require.Equal(t, want, got, "%s, pages of %d", name, limit)
			require.LessOrEqual(t, scanned, n)
		}
	}
	acme := as(t, auth.Producer, "t1")
	_, err := w.Store.DeadLetters(acme, messages.DeadLetterQuery{Tenant: "t2", Limit: 1})
	require.ErrorIs(t, err, api.ErrTenant)
	got, _ := jobs(acme, messages.DeadLetterQuery{Group: "g0", Limit: 10})
	require.Empty(t, got, "its jobs are in group g1")
}

// TestDeadLettersOfManyPartitions: pages have no gap and no repetition even if many partitions have
// entries of the same millisecond. A cursor has 64 bytes at most; one that no page gave is refused.
func TestDeadLettersOfManyPartitions(t *testing.T) {
	w := stagetest.Parallel(t, 64)
	want := map[string]bool{}
	for i := range 300 {
		p := w.Space.All()[i*7%64]
		job := fmt.Sprint("g.", i)
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: p.DeadLetters(), ID: fmt.Sprintf("%d-*", 1_000_000+i/100), Values: []any{"job", job, "payload", "no JSON"}, // other programs may write to the stream
		}).Err())
		want[job] = true
	}
	q := messages.DeadLetterQuery{Limit: 7}
	for {
		page, err := w.Store.DeadLetters(stagetest.Trusted(t), q)
		require.NoError(t, err)
		for _, d := range page.DeadLetters {
			require.True(t, want[d.Job], "%s again", d.Job)
			delete(want, d.Job)
			_, err := json.Marshal(d)
			require.NoError(t, err)
		}
		require.LessOrEqual(t, len(page.Cursor), 64)
		if q.Cursor = page.Cursor; q.Cursor == "" {
			break
		}
	}
	require.Empty(t, want)
	for _, cursor := range []string{"x", "1-0", "1-0,", "1-0,64", "1-0,-1", "1,0", ",0", "0-0,0", "0-1,1"} {
		_, err := w.Store.DeadLetters(stagetest.Trusted(t), messages.DeadLetterQuery{Limit: 1, Cursor: cursor})
		require.ErrorContains(t, err, "cursor: must be one that an earlier page gave", cursor)
	}
}

// TestDeadLettersAreBoundedByBytes: a call of DeadLetters ends when it has looked at 16 MiB, and
// the next call continues there.
func TestDeadLettersAreBoundedByBytes(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	large := `"` + strings.Repeat("x", messages.MaxPayloadBytes-2) + `"`
	const n = 100 // 25 MiB
	for range n {
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: w.Space.All()[0].DeadLetters(), Values: []any{"job", "g.0", "code", "C", "payload", large},
		}).Err())
	}
	q := messages.DeadLetterQuery{Limit: 1000}
	first, err := w.Store.DeadLetters(stagetest.Trusted(t), q)
	require.NoError(t, err)
	require.Len(t, first.DeadLetters, 64)
	q.Cursor = first.Cursor
	second, err := w.Store.DeadLetters(stagetest.Trusted(t), q)
	require.NoError(t, err)
	require.Len(t, second.DeadLetters, n-64)
	require.Empty(t, second.Cursor)

	none, err := w.Store.DeadLetters(stagetest.Trusted(t), messages.DeadLetterQuery{Limit: 1000, Code: "X"})
	require.NoError(t, err)
	require.Equal(t, 64, none.Scanned)
}

// TestStatsOfRoles: Stats names each role, also those without a live process, but the role broker
// only if it has one.
func TestStatsOfRoles(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	var stages []string // the roles of the processes in Stats.Stages, which has no workers
	roles := func() []api.RoleStatus {
		st, err := w.Store.Stats(stagetest.Trusted(t))
		require.NoError(t, err)
		stages = nil
		for _, s := range st.Stages {
			stages = append(stages, s.Role)
		}
		return st.Roles
	}
	none := []api.RoleStatus{
		{Role: "ingest"}, {Role: "fetcher"}, {Role: "dispatcher"}, {Role: "worker"}, {Role: "aggregator"}, {Role: "watcher"},
	}
	require.Equal(t, none, roles())
	for id, role := range map[string]string{"f1": "fetcher", "f2": "fetcher", "w1": "watcher"} {
		require.NoError(t, presence.PublishStage(t.Context(), w.Conn, w.Space, api.StageStatus{ID: id, Role: role}))
	}
	require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space,
		presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "k1"}}))
	_, err := presence.PublishBroker(t.Context(), w.Conn, w.Space, api.StageStatus{ID: "b1", Role: "broker"})
	require.NoError(t, err)
	require.Equal(t, []api.RoleStatus{
		{Role: "ingest"}, {Role: "fetcher", Processes: 2}, {Role: "dispatcher"}, {Role: "worker", Processes: 1},
		{Role: "aggregator"}, {Role: "watcher", Processes: 1}, {Role: "broker", Processes: 1},
	}, roles())
	require.Equal(t, []string{"fetcher", "fetcher", "watcher", "broker"}, stages)
}

func TestRejectedMessages(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		t := w.T
		at := time.Date(2026, 11, 24, 1, 2, 3, 0, time.UTC)
		const all = 45 // more than two chunks
		for i := range all {
			require.NoError(t, w.Conn.Cmd.XAdd(stagetest.Trusted(t), &redis.XAddArgs{Stream: w.Space.Rejected(), ID: fmt.Sprintf("%d-0", i+1), Values: []any{
				"reason", "no such type", "entry", "7-0", "at", at.Format(time.RFC3339Nano), "id", fmt.Sprint("m", i), "type", "no.such", "data", "{}",
			}}).Err())
		}
		var ids []string
		for cursor, first := "", true; first || cursor != ""; first = false {
			page, err := w.Store.Rejected(stagetest.Trusted(t), cursor, 22, false)
			require.NoError(t, err)
			for _, m := range page.Rejected {
				require.Empty(t, m.Data)
				ids = append(ids, m.MessageID)
			}
			cursor = page.Cursor
		}
		require.Len(t, ids, all)
		require.Equal(t, []string{"m44", "m0"}, []string{ids[0], ids[all-1]})

		page, err := w.Store.Rejected(stagetest.Trusted(t), "", 1, true)
		require.NoError(t, err)
		require.Equal(t, "45-0", page.Cursor)
		m := page.Rejected[0]
		require.Equal(t, "{} no.such no such type 7-0 2", fmt.Sprint(m.Data, " ", m.Type, " ", m.Reason, " ", m.Entry, " ", m.Bytes))
		require.Equal(t, at, *m.At)
		for _, cursor := range []string{"x", "1", "-", "1-", "1-2-3", "+", "0-0"} {
			_, err := w.Store.Rejected(stagetest.Trusted(t), cursor, 1, false)
			require.ErrorContains(t, err, "cursor")
		}

		// Of 60 rejected messages of 256 KiB, a page with the limit 1,000 has only 40, because a
		// call reads a bounded number of bytes.
		large := strings.Repeat("x", 256<<10)
		for i := range 60 {
			require.NoError(t, w.Conn.Cmd.XAdd(stagetest.Trusted(t), &redis.XAddArgs{Stream: w.Space.Rejected(), ID: fmt.Sprintf("%d-0", i+100), Values: []any{"data", large}}).Err())
		}
		page, err = w.Store.Rejected(stagetest.Trusted(t), "", 1000, true)
		require.NoError(t, err)
		require.Len(t, page.Rejected, 40)
		require.Equal(t, "120-0", page.Cursor)
	})
}

// TestStatsOfPermits: Stats adds up the permits that all partitions have spent, with each limiter.
func TestStatsOfPermits(t *testing.T) {
	t.Parallel()
	for _, limiter := range []string{ledger.LimiterFixed, ledger.LimiterSliding, ledger.LimiterToken} {
		t.Run(limiter, func(t *testing.T) {
			w := stagetest.Parallel(t, 3)
			const n = 12 // groups of one tenant each, with 10 jobs
			for i := range n {
				w.Submit(messages.SubmitGroup{ID: fmt.Sprint("g", i), Type: "T", Jobs: stagetest.Numbered(10)})
			}
			used := func(m ledger.Meter, rps int64) int64 {
				w.Limit(m, rps, ledger.ShareStatic)
				st, err := w.Store.Stats(stagetest.Trusted(t))
				require.NoError(t, err)
				return st.RateLimit.Used
			}

			long := ledger.Meter{Window: time.Hour, Limiter: limiter}
			start := time.Now()
			require.Zero(t, used(long, 1))
			spent := spend(w, long, 10)
			require.EqualValues(t, 3*10, spent)
			got, back := used(long, 1), int64(0)
			if limiter == ledger.LimiterToken { // its permits come back one by one
				back = int64(math.Ceil(time.Since(start).Seconds()))
			}
			require.LessOrEqual(t, got, spent)
			require.GreaterOrEqual(t, got, spent-back)
			require.Zero(t, used(long, 0), "without a limit")

			short := ledger.Meter{Window: 300 * time.Millisecond, Limiter: limiter}
			used(short, 100)
			w.Await("permits to be used", func() bool {
				spend(w, short, 1)
				return used(short, 100) > 0
			})
			w.Await("the end of the window", func() bool { return used(short, 100) == 0 })
		})
	}
}

// spend admits up to n jobs in each partition under the limit and returns the number of permits that
// they have spent.
func spend(w *stagetest.World, m ledger.Meter, n int) (spent int64) {
	w.T.Helper()
	for _, p := range w.Space.All() {
		r, err := ledger.Admit(context.WithoutCancel(stagetest.Trusted(w.T)), w.Conn.Cmd, p, ledger.AdmitArgs{
			Type:        "T",
			Most:        n,
			Cap:         1 << 30,
			Meter:       m,
			Seed:        "0badcafe",
			LaneWeights: [3]int{6, 3, 1},
		})
		require.NoError(w.T, err)
		for _, permit := range r.Permits {
			spent += permit.N
		}
	}
	return spent
}

// sampled returns the Stats, `second` seconds after its start, of an installation that accepts 2
// jobs a second and ends one a second.
func sampled(second int64) api.Stats {
	return api.Stats{
		ActiveTenants: 3, Totals: api.JobTotals{Accepted: 2 * second, Done: second},
		Types:   []api.TypeStats{{Waiting: second}, {Waiting: 1, NonReady: 2, Ready: 3, InFlight: 4}},
		Workers: []api.WorkerStatus{{Workers: 5, Active: 2}, {Workers: 6}},
	}
}

// TestHistory: the history has the right rates, whether the samples are seconds or minutes apart,
// late, repeated, or from several processes. Each time slot keeps one sample.
func TestHistory(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := stagetest.Trusted(w.T)
		now, err := w.Store.Now(ctx)
		require.NoError(w.T, err)
		begin := now.Truncate(10 * time.Second).Add(-10 * time.Minute)
		// The numbers are the times of the samples in seconds: after a change of leader some come
		// from another process, some twice, one late, and none for a while. Of each 10 s only the
		// first sample is stored.
		for _, second := range []int64{0, 3, 11, 19, 20, 11, 47, 300, 301, 309, 290} {
			at := begin.Add(time.Duration(second) * time.Second)
			require.NoError(w.T, w.Store.Record(ctx, at, sampled(second)))
			require.NoError(w.T, w.Store.Record(ctx, at, api.Stats{}), "twice: nothing")
		}
		h, err := w.Store.History(ctx, 15)
		require.NoError(w.T, err)
		require.Equal(w.T, 10, h.StepSeconds)
		var at []int64
		for _, p := range h.Points {
			second := int64(p.T.Sub(begin).Seconds())
			at = append(at, second)
			require.Equal(w.T, api.HistoryPoint{T: p.T, Accepted: 2, Done: 1, Gauges: api.Gauges{
				Waiting: second + 1, NonReady: 2, Ready: 3, InFlight: 4, ActiveTenants: 3, Pool: 11, Busy: 2,
			}}, p)
		}
		require.Equal(w.T, []int64{11, 20, 47, 300}, at)

		// A failover has lost the latest writes, so totals go back: a rate is never negative.
		require.NoError(w.T, w.Store.Record(ctx, begin.Add(320*time.Second), sampled(100)))
		h, err = w.Store.History(ctx, 15)
		require.NoError(w.T, err)
		require.Zero(w.T, h.Points[len(h.Points)-1].Accepted)

		// The clock of Redis was set back: samples of the future don't stop the history.
		require.NoError(w.T, w.Store.Record(ctx, now.Add(time.Hour), sampled(0)))
		require.NoError(w.T, w.Store.Record(ctx, begin.Add(330*time.Second), sampled(110)))
		h, err = w.Store.History(ctx, 15)
		require.NoError(w.T, err)
		require.Equal(w.T, begin.Add(330*time.Second).UTC(), h.Points[len(h.Points)-1].T)

		// What is no sample is left out.
		require.NoError(w.T, w.Conn.Cmd.RPush(ctx, w.Space.History(), "x", "1 {", "").Err())
		_, err = w.Store.History(ctx, 1440)
		require.NoError(w.T, err)
	})
}

// TestStartDelaysInHistory: a point has the delays of the jobs that started since the sample before, also of
// a worker that began anew, and none if the process took no sample for a while.
func TestStartDelaysInHistory(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	now, err := w.Store.Now(ctx)
	require.NoError(t, err)
	begin := now.Truncate(10 * time.Second).Add(-10 * time.Minute)
	record := func(second int, reports ...presence.WorkerReport) {
		for _, r := range reports {
			require.NoError(t, presence.PublishWorker(ctx, w.Conn, w.Space, r))
		}
		st, err := w.Store.Stats(ctx)
		require.NoError(t, err)
		require.Positive(t, st.Memory.Used)
		require.NoError(t, w.Store.Record(ctx, begin.Add(time.Duration(second)*time.Second), st))
	}
	report := func(id string, ms ...int) presence.WorkerReport {
		r := presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: id}}
		for _, d := range ms {
			r.StartDelays.Add(time.Duration(d) * time.Millisecond)
		}
		return r
	}
	record(0, report("a", 1000, 1000), report("b"))
	record(10, report("a", 1000, 1000, 5, 5, 5), report("b", 300))
	record(20)
	record(30, report("a", 0))
	record(500, report("a", 0, 0))
	h, err := w.Store.History(ctx, 15)
	require.NoError(t, err)
	require.Len(t, h.Points, 4)
	first := h.Points[0]
	require.InDelta(t, 6, *first.StartDelayP50MS, 2)
	require.InDelta(t, 384, *first.StartDelayP99MS, 128)
	require.Nil(t, h.Points[1].StartDelayP50MS)
	require.InDelta(t, 0.5, *h.Points[2].StartDelayP50MS, 0.5)
	require.Nil(t, h.Points[3].StartDelayP99MS)
}

// TestLongHistory: a day has 8,640 samples, and an answer about 1,500 points at most.
func TestLongHistory(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	now, err := w.Store.Now(ctx)
	require.NoError(t, err)
	const n = ledger.MaxSamples + 50
	for i := range int64(n) {
		at := now.Add(-time.Duration(int64(n)-1-i) * 10 * time.Second)
		require.NoError(t, w.Store.Record(ctx, at, sampled(10*i)))
	}
	require.EqualValues(t, ledger.MaxSamples, w.Conn.Cmd.LLen(ctx, w.Space.History()).Val())
	end, err := w.Store.Now(ctx)
	require.NoError(t, err)
	late := int(end.Sub(now)/(10*time.Second)) + 1 // points that a slow machine has missed meanwhile
	for minutes, want := range map[int]struct{ step, least, most int }{
		15: {10, 89, 91}, 60: {10, 359, 361}, 240: {10, 1439, 1441}, 251: {20, 752, 755}, 1440: {60, 1438, 1441},
	} {
		h, err := w.Store.History(ctx, minutes)
		require.NoError(t, err)
		require.Equal(t, want.step, h.StepSeconds, minutes)
		require.GreaterOrEqual(t, len(h.Points), want.least-late, minutes)
		require.LessOrEqual(t, len(h.Points), want.most, minutes)
		for i, p := range h.Points {
			require.InDelta(t, 2, p.Accepted, 0.001, fmt.Sprint(minutes, " ", i))
			require.InDelta(t, 1, p.Done, 0.001)
		}
	}
}

func TestHistoryIsForMetrics(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	_, err := w.Store.History(auth.With(t.Context(), auth.Principal{Role: auth.Metrics}), 15)
	require.NoError(t, err)
	for _, p := range []auth.Principal{{}, {Role: auth.Producer, Tenant: "a"}, {Role: auth.Reader, Tenant: "a"}} {
		_, err := w.Store.History(auth.With(t.Context(), p), 15)
		require.ErrorIs(t, err, api.ErrNotAllowed)
	}
	_, err = w.Store.History(t.Context(), 15)
	require.Error(t, err)
}

func TestWarningsOfASubmission(t *testing.T) {
	t.Parallel()
	total := int64(5)
	payload := []byte("{}")
	const ownTenant = "The group names no tenant, so it is its own tenant: no customer's limit applies to it."
	const unsealed = "The group is not sealed, so it does not end: " +
		"when it has all its jobs, seal it with POST /v1/groups/g/seal or `bulkaction seal g`."
	for name, c := range map[string]struct {
		g    messages.SubmitGroup
		want []string
	}{
		"sealed": {messages.SubmitGroup{Type: "T", Seal: true, Jobs: []messages.Job{{Payload: payload}}}, nil},
		"total":  {messages.SubmitGroup{Type: "T", Total: &total, Jobs: []messages.Job{{Payload: payload}}}, nil},
		"waits": {
			messages.SubmitGroup{Type: "T", Seal: true, Total: &total, Jobs: []messages.Job{{Payload: payload}}},
			[]string{"The group has 1 of 5 jobs (total): it does not end before it has all of them."},
		},
		"no jobs":    {messages.SubmitGroup{Type: "T"}, nil},
		"unsealed":   {messages.SubmitGroup{Type: "T", Jobs: []messages.Job{{Payload: payload}}}, []string{unsealed}},
		"lower case": {messages.SubmitGroup{Type: "t"}, []string{"No live worker serves the type t: its jobs wait until one does. Did you mean T?"}},
		"a type for tests": {messages.SubmitGroup{Type: "NOOP", Seal: true, Jobs: []messages.Job{{Payload: payload}}}, []string{
			"No live worker serves the type NOOP: its jobs wait until one does. Name it in BULKACTION_WORKER_TYPES."}},
		"a type that needs accounts": {messages.SubmitGroup{Type: "PUSH_NOTIFICATION", Seal: true, Jobs: []messages.Job{{Payload: payload}}}, []string{
			"No live worker serves the type PUSH_NOTIFICATION: its jobs wait until one does. Workers serve it with BULKACTION_PUSH_ACCOUNTS_FILE."}},
		"types of jobs": {
			messages.SubmitGroup{Type: "X", Seal: true, Jobs: []messages.Job{{Type: "U", Payload: payload}, {Type: "Y", Payload: payload}, {Type: "Y", Payload: payload}}},
			[]string{"No live worker serves the type Y: its jobs wait until one does."},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.g.ID = "g"
			w := stagetest.Shared(t)
			require.NoError(t, presence.PublishWorker(stagetest.Trusted(t), w.Conn, w.Space, presence.WorkerReport{
				WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"T", "U"}}}))
			a, err := w.Store.Submit(stagetest.Trusted(t), &c.g, groups.Origin{})
			require.NoError(t, err)
			require.Equal(t, append(c.want, ownTenant), a.Warnings)
			require.Equal(t, "g", a.Tenant, "a group without a tenant is its own tenant")
		})
	}
}

// TestReusedIDWithoutTenant: a group id that was used without a tenant can't be used again with a
// tenant. The answer does not say whose id it is.
func TestReusedIDWithoutTenant(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Type: "T", Seal: true}, groups.Origin{})
	require.NoError(t, err)
	_, err = w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Seal: true}, groups.Origin{})
	require.ErrorIs(t, err, api.ErrConflict)
	require.ErrorContains(t, err, "group g: this id is taken: choose another")
}
