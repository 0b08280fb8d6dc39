package groups_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestRepeatedSubmissionOfAnEndedGroup: the answer repeats the first one, and a warning says what
// the group is now.
func TestRepeatedSubmissionOfAnEndedGroup(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	w.Store = w.NewStore(groups.Config{KeepIdempotencyKeys: time.Hour})
	served(w, "T")
	submit := func(id, key string) api.Accepted {
		g := messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T", Seal: true, Jobs: stagetest.Numbered(1)}
		a, err := w.Store.Submit(ctx, &g, groups.Origin{At: time.Now(), IdempotencyKey: key, GeneratedID: key != ""})
		require.NoError(t, err)
		return a
	}
	first, keyed := submit("cancelled", ""), submit("other", "key")
	require.Empty(t, first.Warnings)
	require.Equal(t, first, submit("cancelled", ""), "an unfinished group: no warning")
	for _, id := range []string{"cancelled", "other"} {
		_, err := w.Store.Cancel(ctx, id)
		require.NoError(t, err)
	}
	for _, c := range []struct{ before, again api.Accepted }{{first, submit("cancelled", "")}, {keyed, submit("another", "key")}} {
		require.Len(t, c.again.Warnings, 1)
		require.Contains(t, c.again.Warnings[0], "was submitted before and is CANCELLED now")
		c.again.Warnings = nil
		require.Equal(t, c.before, c.again)
	}
}

// TestSubmissionWithoutTenant: RequireTenant refuses it, whether it is a request or a message, and
// uses up neither the group's id nor an idempotency key.
func TestSubmissionWithoutTenant(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	w.Store = w.NewStore(groups.Config{KeepIdempotencyKeys: time.Hour, RequireTenant: true})
	g := messages.SubmitGroup{ID: "g", Type: "T", Seal: true, Jobs: stagetest.Numbered(1)}
	for _, o := range []groups.Origin{{IdempotencyKey: "key"}, {Published: true}} {
		_, err := w.Store.Submit(ctx, &g, o)
		var invalid *messages.ValidationError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "tenant", invalid.Fields[0].Field)
		require.Contains(t, invalid.Fields[0].Problem, "BULKACTION_REQUIRE_TENANT")
	}
	g.Tenant = "acme"
	_, err := w.Store.Submit(ctx, &g, groups.Origin{IdempotencyKey: "key"})
	require.NoError(t, err)
}

func TestBasePriorityHasNoEffectUnderThePolicyFair(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	served(w, "T")
	for fair, want := range map[bool][]string{
		true:  {"base_priority has no effect with BULKACTION_FAIR_QUEUE_POLICY=fair: use priority (high, normal, low)."},
		false: nil,
	} {
		g := messages.SubmitGroup{ID: "g" + string(rune('0'+len(want))), Tenant: "acme", Type: "T", Seal: true, BasePriority: 5, Jobs: stagetest.Numbered(1)}
		a, err := w.NewStore(groups.Config{FairPolicy: fair}).Submit(stagetest.Trusted(t), &g, groups.Origin{})
		require.NoError(t, err)
		require.Equal(t, want, a.Warnings)
	}
}

// TestWhyCapacity: a job that only waits for a slot says so, with the numbers.
func TestWhyCapacity(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	served(w, "T")
	busy := presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"T"}, Workers: 10, Active: 10}, RunMS: map[string]float64{"T": 3000}}
	require.NoError(t, presence.PublishWorker(stagetest.Trusted(t), w.Conn, w.Space, busy))
	w.Jobs("g", "T", 40)
	j := w.Job("g", 29)
	require.Equal(t, api.WhyCapacity, j.Waiting)
	require.Equal(t, "10 of 10 slots of T are busy; 29 jobs of its tenant come before it; about 9 s.", j.Why.Detail)
	require.InDelta(t, 9, *j.Why.EstimateSeconds, 0.01)
	w.Admit("T")
	j = w.Job("g", 3)
	require.Equal(t, api.WhyCapacity, j.Waiting)
	require.Equal(t, "10 of 10 slots of T are busy, behind 3 others; about 1 s.", j.Why.Detail)
	busy.Active = 9
	require.NoError(t, presence.PublishWorker(stagetest.Trusted(t), w.Conn, w.Space, busy))
	require.Equal(t, api.WhyFairness, w.Job("g", 3).Waiting)
}

// TestWhyMissingRole: why names the role that has to act next and has no live process.
func TestWhyMissingRole(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	require.NoError(t, presence.PublishWorker(ctx, w.Conn, w.Space, presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"T"}}}))
	why := func(group string) api.Why {
		why, err := w.Store.Why(ctx, group)
		require.NoError(t, err)
		return why
	}
	w.Jobs("g", "T", 1)
	require.Equal(t, api.WhyMissingRole, why("g").Reason)
	require.Equal(t, "No fetcher is alive: start one.", why("g").Detail)
	require.NoError(t, presence.PublishStage(ctx, w.Conn, w.Space, api.StageStatus{ID: "f", Role: "fetcher"}))
	require.Equal(t, api.WhyFairness, why("g").Reason)
	presence.Withdraw(ctx, w.Conn, w.Space, "f")
	require.Regexp(t, `^No fetcher has been alive for \d+ s: start one\.$`, why("g").Detail)
	live, err := presence.Stages(ctx, w.Conn, w.Space)
	require.NoError(t, err)
	require.Empty(t, live)

	w.Admit("T")
	w.Fail("BOOM", w.Take("T", "w", 1)...)
	ended := why("g")
	require.Equal(t, api.WhyMissingRole, ended.Reason)
	require.Contains(t, ended.Detail, "No watcher is alive: start one.")
	require.NotContains(t, ended.Detail, "about to end")
	served(w, "T")
	require.Empty(t, why("g").Reason)
	require.Contains(t, why("g").Detail, "about to end")
}

// TestDoneJob: a done job shows its result, and when, where and for how long it ran; a key that may
// not see payloads gets no result.
func TestDoneJob(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	w.Jobs("g", "T", 3)
	w.Admit("T")
	w.Done(`{"id":"m-1"}`, w.Take("T", "w", 3)...)
	require.Contains(t, w.Job("g", 1).ResultHint, "not reduced yet")
	w.Reduce()
	line := `{"ordinal":1,"key":"k","duration_ms":1500,"attempts":2,"started_ms":1764276245123,"worker":"w-1",` +
		`"last_error":{"code":"BUSY","error":"later","attempt":1,"at":"2025-11-27T20:44:05Z"},"data":{"id":"m-1"}}`
	lines, err := w.Conn.Cmd.LIndex(ctx, w.P.Results("g"), 0).Result()
	require.NoError(t, err)
	all := strings.Split(lines, "\n")
	all[1] = line
	require.NoError(t, w.Conn.Cmd.LSet(ctx, w.P.Results("g"), 0, strings.Join(all, "\n")).Err())

	j := w.Job("g", 1)
	require.JSONEq(t, `{"id":"m-1"}`, string(j.Result))
	require.Equal(t, "k", j.Key)
	require.Equal(t, "w-1", j.Worker)
	require.InDelta(t, 1.5, *j.RunSeconds, 1e-9)
	require.EqualValues(t, 1764276245123, j.StartedAt.UnixMilli())
	require.Len(t, j.Errors, 1)
	require.Equal(t, "BUSY", j.LastError.Code)
	require.Equal(t, 2, j.Attempts)
}

// TestFindResult: the result of each job is found in a bounded read, in many chunks that are not
// quite in order; beyond the bound the reply says that not all was read.
func TestFindResult(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	const chunks, each = 64, 10
	for c := range chunks {
		from := (c ^ 1) * each // neighbours are swapped
		lines := make([]string, each)
		for i := range lines {
			lines[i] = fmt.Sprintf(`{"ordinal":%d,"duration_ms":1,"attempts":1,"data":1}`, from+i)
		}
		require.NoError(t, w.Conn.Cmd.RPush(ctx, w.P.Results("g"), strings.Join(lines, "\n")).Err())
	}
	for ordinal := int64(0); ordinal < chunks*each; ordinal += 7 {
		line, _, err := ledger.FindResult(ctx, w.Conn.Cmd, w.P, "g", ordinal, 12*each*60)
		require.NoError(t, err)
		require.Contains(t, string(line), fmt.Sprintf(`{"ordinal":%d,`, ordinal))
	}
	line, all, err := ledger.FindResult(ctx, w.Conn.Cmd, w.P, "g", 10_000, 10*each*60)
	require.NoError(t, err)
	require.Nil(t, line)
	require.False(t, all)
	_, all, err = ledger.FindResult(ctx, w.Conn.Cmd, w.P, "g", 10_000, 1<<20)
	require.NoError(t, err)
	require.True(t, all)
}

func TestRunningJob(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 1)
	w.Admit("T")
	w.Take("T", "w", 1)
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	require.NoError(t, presence.PublishWorker(context.WithoutCancel(stagetest.Trusted(t)), w.Conn, w.Space, presence.WorkerReport{
		WorkerStatus: api.WorkerStatus{ID: "w-1", Types: []string{"T"}, SeenAt: at.Add(90 * time.Second)},
		RunningSince: map[string]time.Time{"g.0": at}}))
	j := w.Job("g", 0)
	require.Equal(t, "in_flight", j.State)
	require.Equal(t, at, *j.StartedAt)
	require.InDelta(t, 90, *j.RunSeconds, 1e-9)
	require.Equal(t, "w-1", j.Worker)
}

// TestRunnableJobs: scheduled, paused and non-ready jobs, and those of tenants that wait for a
// permit, are in the backlog and are not runnable.
func TestRunnableJobs(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	later := time.Now().Add(time.Hour)
	w.Jobs("runs", "T", 3)
	w.Submit(messages.SubmitGroup{ID: "scheduled", Tenant: "acme", Type: "T", RunAt: &later, Jobs: stagetest.Numbered(100)})
	w.Submit(messages.SubmitGroup{ID: "held", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(50)})
	w.Submit(messages.SubmitGroup{ID: "tenant", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(20)})
	w.Submit(messages.SubmitGroup{ID: "type", Tenant: "acme", Type: "U", Jobs: stagetest.Numbered(7)})
	_, err := w.Store.Pause(ctx, "held")
	require.NoError(t, err)
	require.NoError(t, w.Store.PauseTenant(ctx, "globex"))
	require.NoError(t, w.Store.PauseType(ctx, "U"))
	runnable := func() (n [2]int64) {
		st, err := w.Store.Stats(ctx)
		require.NoError(t, err)
		require.Len(t, st.Types, 2)
		require.EqualValues(t, 173, st.Types[0].Backlog)
		return [2]int64{st.Types[0].Runnable, st.Types[1].Runnable}
	}
	require.Equal(t, [2]int64{3, 0}, runnable())
	require.NoError(t, w.Store.ResumeTenant(ctx, "globex"))
	require.NoError(t, w.Store.ResumeType(ctx, "U"))
	require.Equal(t, [2]int64{23, 7}, runnable())
	w.Admit("T")
	require.Equal(t, [2]int64{23, 7}, runnable(), "ready jobs are runnable, too")
}

// TestRejectedJobs: what backpressure refuses is counted by its jobs; a message is not, because it
// stays in its stream.
func TestRejectedJobs(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 10)
	tel, err := telemetry.Setup(t.Context(), telemetry.Options{Service: "ingest", LogWriter: io.Discard})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tel.Shutdown(context.WithoutCancel(t.Context())) })
	w.Tel = tel
	w.Store = w.NewStore(groups.Config{MaxBacklog: 5})
	for _, o := range []groups.Origin{{Published: true}, {}} {
		g := messages.SubmitGroup{ID: "h", Tenant: "acme", Type: "T", Seal: true, Jobs: stagetest.Numbered(4)}
		_, err := w.Store.Submit(stagetest.Trusted(t), &g, o)
		var full *api.BackpressureError
		require.True(t, errors.As(err, &full), "%v", err)
	}
	answer := httptest.NewRecorder()
	w.Tel.MetricsHandler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Contains(t, answer.Body.String(), "bulk_action_backpressure_rejected_total 4\n")
}
