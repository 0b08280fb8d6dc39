package operations_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/operations"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// world is an installation with operations. Its methods end the test when they fail.
type world struct {
	*stagetest.World
	ids int
}

func both(t *testing.T, test func(testing.TB, world)) {
	t.Helper()
	stagetest.Both(t, func(w *stagetest.World) { test(w.T, world{World: w}) })
}

func (w *world) log() *activity.Log {
	return activity.New(w.Conn.Cmd, w.Space, 0, w.Tel.Log)
}

// start starts an operation in the name of a principal; the zero one may do everything.
func (w *world) start(p auth.Principal, r api.OperationRequest) string {
	w.T.Helper()
	w.ids++
	ctx, id := stagetest.Trusted(w.T), fmt.Sprintf("o-%d", w.ids)
	if p.Role != "" {
		ctx = auth.With(ctx, p)
	}
	o, err := w.Store.StartOperation(ctx, id, r)
	require.NoError(w.T, err)
	require.Equal(w.T, api.OperationRunning, o.State)
	return id
}

func (w *world) get(id string) api.Operation {
	w.T.Helper()
	o, err := w.Store.Operation(stagetest.Trusted(w.T), id)
	require.NoError(w.T, err)
	require.Equal(w.T, o.Matched, o.Changed+o.Skipped)
	return o
}

// lead makes a process the leader, whoever leads.
func (w *world) lead(process string) operations.Lead {
	w.T.Helper()
	ctx := w.T.Context()
	require.NoError(w.T, w.Conn.Cmd.HDel(ctx, w.P.Watch(), "until").Err())
	fence, err := ledger.Lead(ctx, w.Conn.Cmd, w.P, process, time.Hour)
	require.NoError(w.T, err)
	return func() int64 { return fence }
}

func (w *world) runner(conn *redisx.Conn) *operations.Runner {
	return operations.New(conn, w.Space, w.Tel.Log, w.log())
}

// settle does what the watcher does with reopened groups.
func (w *world) settle() {
	w.T.Helper()
	for _, p := range w.Space.All() {
		for _, id := range w.Conn.Cmd.SMembers(w.T.Context(), p.Dirty()).Val() {
			for more := true; more; {
				var err error
				more, err = ledger.Requeue(w.T.Context(), w.Conn.Cmd, p, id)
				require.NoError(w.T, err)
			}
			w.advance(id)
		}
	}
}

func (w *world) advance(ids ...string) {
	w.T.Helper()
	for _, id := range ids {
		for _, p := range w.Space.All() {
			_, err := ledger.Advance(w.T.Context(), w.Conn.Cmd, p, id)
			require.NoError(w.T, err)
		}
	}
}

// finish carries out all operations.
func (w *world) finish(lead operations.Lead) {
	w.T.Helper()
	r := w.runner(w.Conn)
	for step := range 10_000 {
		_, err := r.Step(w.T.Context(), lead)
		require.NoError(w.T, err)
		if ids, err := ledger.OpenOperations(w.T.Context(), w.Conn.Cmd, w.Space); err == nil && len(ids) == 0 {
			return
		}
		if step%4 == 3 { // the pages of dead letters wait for that
			w.settle()
		}
	}
	require.Fail(w.T, "operations do not end")
}

// failed stores groups of type T whose jobs have failed, with code X and, of the last job, Y.
func (w *world) failed(jobs int, ids ...string) {
	w.T.Helper()
	for _, id := range ids {
		w.Jobs(id, "T", jobs)
		w.Admit("T")
		taken := w.Take("T", "c", jobs)
		w.Fail("X", taken[:jobs-1]...)
		w.Fail("Y", taken[jobs-1])
		w.advance(id)
		require.True(w.T, w.Group(id).Status.Ended(), w.Group(id).Status)
	}
}

// violations returns what the audit finds wrong with operations.
func (w *world) violations() (found []audit.Violation) {
	w.T.Helper()
	report, err := audit.Run(w.T.Context(), w.Conn, w.Space, audit.Options{})
	require.NoError(w.T, err)
	for _, v := range report.Violations {
		if v.Law == audit.LawOperations {
			found = append(found, v)
		}
	}
	return found
}

func named(prefix string, n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprintf("%s%d", prefix, i))
	}
	return ids
}

func reasons(o api.Operation) map[string]int64 {
	all := map[string]int64{}
	for _, r := range o.Reasons {
		all[r.Reason] = r.Count
	}
	return all
}

// TestGroups: each operation changes the groups that it can change, and skips each other one that
// matches with its reason. A dry run counts the same and changes nothing.
func TestGroups(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		w.failed(2, "f1", "f2")
		w.Jobs("done", "D", 1)
		w.Finish("D")
		w.advance("done")
		w.Jobs("open1", "O", 1)
		w.Jobs("open2", "O", 1)
		w.Jobs("paused", "O", 1)
		w.Jobs("cancelled", "O", 1)
		ctx := stagetest.Trusted(t)
		_, err := w.Store.Pause(ctx, "paused")
		require.NoError(t, err)
		_, err = w.Store.Cancel(ctx, "cancelled")
		require.NoError(t, err)
		w.Submit(messages.SubmitGroup{ID: "tagged", Tenant: "acme", Type: "O", Jobs: stagetest.Numbered(1), Tags: api.Tags{"k": "v"}})
		lead, all := w.lead("a"), api.OperationFilter{All: true}
		for _, c := range []struct {
			do      string
			filter  api.OperationFilter
			changed int64
			skipped map[string]int64
		}{
			{api.OpPause, all, 3, map[string]int64{api.SkipEnded: 4, api.SkipAlready: 1}},
			{api.OpResume, api.OperationFilter{Paused: new(true)}, 4, map[string]int64{}},
			{api.OpResume, all, 0, map[string]int64{api.SkipEnded: 4, api.SkipAlready: 4}},
			{api.OpRetry, api.OperationFilter{Code: "Y"}, 2, map[string]int64{}},
			{api.OpRetry, all, 0, map[string]int64{api.SkipNotEnded: 6, api.SkipNoFailedJobs: 1, api.SkipCancelled: 1}},
			{api.OpCancel, api.OperationFilter{Type: "O", Prefix: "open"}, 2, map[string]int64{}},
			{api.OpCancel, api.OperationFilter{Status: api.StatusCompleted}, 0, map[string]int64{api.SkipEnded: 1}},
			{api.OpCancel, api.OperationFilter{Tags: api.Tags{"k": "v"}}, 1, map[string]int64{}},
			{api.OpCancel, api.OperationFilter{Tags: api.Tags{"k": "v", "l": "w"}, Tenant: "acme"}, 0, map[string]int64{}},
			{api.OpCancel, api.OperationFilter{Tags: api.Tags{"k": "v"}, Tenant: "acme"}, 0, map[string]int64{api.SkipAlready: 1}},
			{api.OpCancel, api.OperationFilter{Tenant: "other"}, 0, map[string]int64{}},
			{api.OpCancel, api.OperationFilter{Until: new(time.Now().Add(-time.Hour))}, 0, map[string]int64{}},
			{api.OpCancel, api.OperationFilter{Since: new(time.Now().Add(-time.Hour))}, 3, map[string]int64{api.SkipEnded: 1, api.SkipAlready: 4}},
		} {
			what := fmt.Sprintf("%s %+v", c.do, c.filter)
			for _, dry := range []bool{true, false} {
				id := w.start(auth.Principal{}, api.OperationRequest{Do: c.do, Filter: c.filter, DryRun: dry})
				w.finish(lead)
				o := w.get(id)
				require.Equal(t, api.OperationCompleted, o.State, what)
				require.Equal(t, c.changed, o.Changed, what)
				require.Equal(t, c.skipped, reasons(o), what)
				require.Equal(t, 1.0, o.Progress)
				require.NotNil(t, o.EndedAt)
			}
			w.settle()
		}
		require.EqualValues(t, 2, w.Group("f1").Round)
		require.EqualValues(t, 1, w.Group("done").Round)
		require.EqualValues(t, 1, w.Counts("f1").Failed, "only the job with code Y ran again")
		log, err := w.log().Read(t.Context(), activity.Query{Limit: 1})
		require.NoError(t, err)
		require.Equal(t, "operation.end", log.Activity[0].Action)
		require.JSONEq(t, `{"do":"cancel","state":"COMPLETED","dry_run":false,"matched":8,"changed":3,"skipped":5}`, string(log.Activity[0].After))
	})
}

// killed lets a connection work for so many commands. With the reply of the last one lost, it was
// carried out.
type killed struct {
	redistest.NoHook
	left  int
	reply bool // the last command is carried out
}

var errKilled = errors.New("killed")

func (k *killed) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		k.left--
		switch {
		case k.left > 0:
			return next(ctx, cmd)
		case k.left == 0 && k.reply:
			_ = next(ctx, cmd)
		}
		cmd.SetErr(errKilled)
		return errKilled
	}
}

func (k *killed) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if k.left--; k.left > 0 {
			return next(ctx, cmds)
		}
		for _, cmd := range cmds {
			cmd.SetErr(errKilled)
		}
		return errKilled
	}
}

// TestOwnerIsKilledAtEachCommand: whichever command the owner dies before or after, the next one
// completes the operation: each group is reopened once, and counts once.
func TestOwnerIsKilledAtEachCommand(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		ran := false
		for k := 1; !ran; k++ {
			for _, reply := range []bool{false, true} {
				prefix := fmt.Sprintf("g%d%t-", k, reply)
				w.failed(1, named(prefix, 3)...)
				w.Jobs(prefix+"open", "O", 1)
				id := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpRetry, Filter: api.OperationFilter{Prefix: prefix}})
				conn := w.Connect()
				conn.Cmd.AddHook(&killed{left: k, reply: reply})
				first, lead := w.runner(conn), w.lead(prefix)
				var err error
				for worked := true; worked && err == nil; {
					worked, err = first.Step(t.Context(), lead)
				}
				ran = err == nil
				w.finish(w.lead("next"))
				o := w.get(id)
				require.Equal(t, api.OperationCompleted, o.State)
				require.EqualValues(t, []int64{4, 3, 1}, []int64{o.Matched, o.Changed, o.Skipped}, "killed at command %d", k)
				w.settle()
				for _, g := range named(prefix, 3) {
					require.EqualValues(t, 2, w.Group(g).Round, "killed at command %d", k)
				}
				w.Finish("T")
			}
		}
	})
}

// away is a Redis connection that breaks at the command number left, once.
type away struct {
	redistest.NoHook
	left int
}

func (a *away) fails() bool { a.left--; return a.left == 0 }

func (a *away) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if a.fails() {
			cmd.SetErr(io.EOF)
			return io.EOF
		}
		return next(ctx, cmd)
	}
}

func (a *away) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if a.fails() {
			for _, cmd := range cmds {
				cmd.SetErr(io.EOF)
			}
			return io.EOF
		}
		return next(ctx, cmds)
	}
}

// TestRedisIsAwayAtEachCommand: whichever command fails because Redis is away, the step returns its
// error, and a later one goes on: nothing is skipped as unreadable.
func TestRedisIsAwayAtEachCommand(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		for _, do := range []string{api.OpRetry, api.OpRetryDeadLetters} {
			ran := false
			for k := 1; !ran; k++ {
				group := fmt.Sprintf("%s-%d", do, k)
				w.failed(2, group)
				filter := api.OperationFilter{Prefix: group}
				if api.OnDeadLetters(do) {
					filter = api.OperationFilter{Group: group}
				}
				id := w.start(auth.Principal{}, api.OperationRequest{Do: do, Filter: filter})
				conn := w.Connect()
				conn.Cmd.AddHook(&away{left: k})
				r, lead := w.runner(conn), w.lead(group)
				var err error
				for worked := true; worked && err == nil; {
					worked, err = r.Step(t.Context(), lead)
				}
				ran = err == nil
				w.finish(w.lead("next"))
				o := w.get(id)
				require.Empty(t, o.Reasons, "away at command %d of %s", k, do)
				require.EqualValues(t, map[bool]int64{false: 1, true: 2}[api.OnDeadLetters(do)], o.Changed, "away at command %d of %s", k, do)
				w.settle()
				w.Finish("T")
			}
		}
	})
}

// TestGroupsThatNeverSettle: groups that the watcher can't move on don't hold up an operation for ever.
func TestGroupsThatNeverSettle(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		for _, id := range named("damaged", 101) {
			require.NoError(t, w.Conn.Cmd.SAdd(t.Context(), w.P.Dirty(), id).Err())
		}
		w.Jobs("a", "T", 1)
		id := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{Prefix: "a"}})
		r, lead := w.runner(w.Conn), w.lead("a")
		for range 2 {
			_, err := r.Step(t.Context(), lead)
			require.NoError(t, err)
		}
		require.EqualValues(t, 1, w.get(id).Changed)
		require.True(t, w.Group("a").Paused)
	})
}

// TestStaleOwner: an owner that was replaced neither plans nor counts, at any point.
func TestStaleOwner(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		w.Jobs("g", "T", 1)
		id := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
		old, r := w.lead("old"), w.runner(w.Conn)
		next := w.lead("new")
		_, err := r.Step(t.Context(), old)
		require.ErrorIs(t, err, ledger.ErrFenced)
		_, err = r.Step(t.Context(), next) // plans
		require.NoError(t, err)
		_, err = r.Step(t.Context(), old)
		require.ErrorIs(t, err, ledger.ErrFenced)
		require.Zero(t, w.get(id).Matched)
		_, err = r.Step(t.Context(), func() int64 { return 0 })
		require.ErrorIs(t, err, ledger.ErrFenced, "it is not certain that it leads")
		before, err := ledger.ReadOperations(t.Context(), w.Conn.Cmd, w.Space, id)
		require.NoError(t, err)
		w.finish(next)
		require.EqualValues(t, 1, w.get(id).Changed)
		require.ErrorIs(t, ledger.CountOperation(t.Context(), w.Conn.Cmd, w.Space, next(), &before[0], 1, nil), ledger.ErrStale)
		require.ErrorIs(t, ledger.PlanOperation(t.Context(), w.Conn.Cmd, w.Space, next(), &before[0], nil, "", 1, false), ledger.ErrStale)
		require.EqualValues(t, 1, w.get(id).Changed)
	})
}

// before calls a function before the first HGETALL of a connection.
type before struct {
	redistest.NoHook
	call func()
}

func (b *before) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if call := b.call; call != nil && cmds[0].Name() == "hgetall" {
			b.call = nil
			call()
		}
		return next(ctx, cmds)
	}
}

// TestEndsWhileItIsRead: an operation that ends after the owner has listed it, and before the owner
// reads it, keeps its state.
func TestEndsWhileItIsRead(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		w.Jobs("g", "T", 1)
		id := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
		conn := w.Connect()
		conn.Cmd.AddHook(&before{call: func() {
			_, err := w.Store.ControlOperation(stagetest.Trusted(t), id, api.CancelOperation)
			require.NoError(t, err)
		}})
		_, err := w.runner(conn).Step(t.Context(), w.lead("a"))
		require.NoError(t, err)
		o := w.get(id)
		require.Equal(t, api.OperationCancelled, o.State, o.Error)
		require.Empty(t, o.Error)
	})
}

// TestPauseAndCancel: between any two steps an operation can be paused and resumed, and a cancelled one
// ends with its page counted.
func TestPauseAndCancel(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		const n = 450 // three pages
		for i := range n {
			w.Submit(messages.SubmitGroup{ID: fmt.Sprintf("g%03d", i), Tenant: "acme", Type: "T"})
		}
		all := api.OperationRequest{Do: api.OpCancel, Filter: api.OperationFilter{All: true}, DryRun: true}
		lead, r, ctx := w.lead("a"), w.runner(w.Conn), stagetest.Trusted(t)
		step := func() bool {
			worked, err := r.Step(t.Context(), lead)
			require.NoError(t, err)
			return worked
		}
		control := func(id string, do api.OperationCommand) api.OperationState {
			o, err := w.Store.ControlOperation(ctx, id, do)
			require.NoError(t, err)
			return o.State
		}
		id, paused := w.start(auth.Principal{}, all), 0
		for w.get(id).State == api.OperationRunning {
			require.Equal(t, api.OperationPaused, control(id, api.PauseOperation))
			if step() {
				require.False(t, step(), "only the page that was planned is done")
			}
			if w.get(id).State == api.OperationCompleted { // it was the last one
				break
			}
			require.Equal(t, api.OperationRunning, control(id, api.ResumeOperation))
			step()
			paused++
		}
		require.GreaterOrEqual(t, paused, 2)
		require.EqualValues(t, n, w.get(id).Matched)

		id = w.start(auth.Principal{}, all)
		require.Equal(t, api.OperationCancelled, control(id, api.CancelOperation), "nothing is planned")
		id = w.start(auth.Principal{}, all)
		step()
		step()
		step()
		require.Equal(t, api.OperationCancelling, control(id, api.CancelOperation))
		require.Equal(t, api.OperationCancelling, control(id, api.CancelOperation))
		_, err := w.Store.ControlOperation(ctx, id, api.PauseOperation)
		require.ErrorIs(t, err, api.ErrConflict)
		step()
		o := w.get(id)
		require.Equal(t, api.OperationCancelled, o.State)
		require.EqualValues(t, 400, o.Matched)
		_, err = w.Store.ControlOperation(ctx, "none", api.PauseOperation)
		require.ErrorIs(t, err, api.ErrNotFound)
	})
}

// TestDeadLetters: the letters of a group on several pages run again in one round, and each counts
// once. The others stay, and can be deleted.
func TestDeadLetters(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		const n = 130 // three pages
		w.failed(n, "big")
		w.failed(2, "small")
		w.Jobs("other", "T", 1)
		w.Admit("T")
		w.Fail("X", w.Take("T", "c", 1)...)
		w.advance("other")
		lead, start := w.lead("a"), time.Now()
		dry := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpRetryDeadLetters, Filter: api.OperationFilter{Code: "X"}, DryRun: true})
		w.finish(lead)
		require.EqualValues(t, n+1, w.get(dry).Changed)
		id := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpRetryDeadLetters, Filter: api.OperationFilter{Group: "big", Code: "X", Type: "T"}})
		w.finish(lead)
		w.settle()
		require.EqualValues(t, n-1, w.get(id).Changed)
		require.EqualValues(t, 2, w.Group("big").Round)
		require.Equal(t, api.Counts{Accepted: n, Waiting: n - 1, Failed: 1}, w.Counts("big"))
		require.Len(t, w.DeadLetters(), 4)

		id = w.start(auth.Principal{}, api.OperationRequest{Do: api.OpRetryDeadLetters, Filter: api.OperationFilter{All: true}})
		w.finish(lead)
		require.Equal(t, map[string]int64{api.SkipNotEnded: 1}, reasons(w.get(id)), "the rest of big")
		require.EqualValues(t, 3, w.get(id).Changed)
		w.settle()
		id = w.start(auth.Principal{}, api.OperationRequest{Do: api.OpDeleteDeadLetters, Filter: api.OperationFilter{Until: &start}})
		w.finish(lead)
		require.EqualValues(t, 1, w.get(id).Changed)
		require.Empty(t, w.DeadLetters())
		require.EqualValues(t, 1, w.Counts("big").Failed, "the job can be retried with its group")
	})
}

// TestLettersWhileTheirGroupRuns: the pages of an operation meet their group as it runs, and after it
// has ended again.
func TestLettersWhileTheirGroupRuns(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		const n = 120
		for g, hold := range map[string]int{"runs": 1, "ends": 0} {
			w.failed(n, g)
			id := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpRetryDeadLetters, Filter: api.OperationFilter{Group: g}})
			lead, r := w.lead("a"), w.runner(w.Conn)
			var held []stagetest.Held
			for page, jobs := range []int{50, 50, 20} {
				for range 2 {
					_, err := r.Step(t.Context(), lead)
					require.NoError(t, err)
				}
				w.settle()
				w.Admit("T")
				taken := w.Take("T", "c", jobs)
				if page == 0 { // one of them runs, so that the round goes on
					held, taken = taken[:hold], taken[hold:]
				}
				w.Done("1", taken...)
				w.Reduce()
				w.advance(g)
			}
			w.finish(lead)
			w.Done("1", held...)
			w.Reduce()
			require.EqualValues(t, n, w.get(id).Changed)
			require.EqualValues(t, map[string]int{"runs": 2, "ends": 4}[g], w.Group(g).Round)
			require.Equal(t, api.StatusCompleted, w.Group(g).Status)
		}
		require.Empty(t, w.DeadLetters())
		report, err := audit.Run(t.Context(), w.Conn, w.Space, audit.Options{})
		require.NoError(t, err)
		require.Empty(t, report.Violations)
	})
}

// TestDeadLettersOfOneTenant: the key of a tenant does not learn how many dead letters others have.
func TestDeadLettersOfOneTenant(t *testing.T) {
	w := world{World: stagetest.Parallel(t, 1)}
	for tenant, jobs := range map[string]int{"acme": 3, "globex": 60} {
		w.Submit(messages.SubmitGroup{ID: tenant, Tenant: tenant, Type: "T", Jobs: stagetest.Numbered(jobs)})
		w.Admit("T")
		w.Fail("X", w.Take("T", "c", jobs)...)
		w.advance(tenant)
	}
	lead := w.lead("a")
	for tenant, want := range map[string][]int64{"acme": {0, 3, 3}, "": {63, 63, 63}} {
		p := auth.Principal{}
		if tenant != "" {
			p = auth.Principal{KeyID: "k", Role: auth.Operator, Tenant: tenant}
		}
		id := w.start(p, api.OperationRequest{Do: api.OpDeleteDeadLetters, DryRun: true, Filter: api.OperationFilter{All: true}})
		require.Equal(t, want[0], w.get(id).Total)
		w.finish(lead)
		o := w.get(id)
		require.Equal(t, want, []int64{o.Total, o.Examined, o.Changed})
		require.EqualValues(t, 1, o.Progress)
	}
}

// TestTenants: what a key of a tenant starts touches only this tenant's groups, whatever its filter
// says by then; and nobody else's key sees it.
func TestTenants(t *testing.T) {
	w := world{World: stagetest.Parallel(t, 4)}
	for _, tenant := range []string{"acme", "globex"} {
		for i := range 5 {
			w.Submit(messages.SubmitGroup{ID: fmt.Sprintf("%s%d", tenant, i), Tenant: tenant, Type: "T", Jobs: stagetest.Numbered(1)})
		}
	}
	acme, globex := auth.Principal{KeyID: "k1", Role: auth.Producer, Tenant: "acme"}, auth.Principal{KeyID: "k2", Role: auth.Producer, Tenant: "globex"}
	id := w.start(acme, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
	require.NoError(t, w.Conn.Cmd.HSet(t.Context(), w.P.Operation(id), "filter", `{"tenant":"globex"}`).Err())
	lead := w.lead("a")
	w.finish(lead)
	require.EqualValues(t, 5, w.get(id).Changed)
	require.Equal(t, "k1", w.get(id).CreatedBy)
	require.True(t, w.Group("acme0").Paused)
	require.False(t, w.Group("globex0").Paused)

	ctx := auth.With(t.Context(), globex)
	_, err := w.Store.Operation(ctx, id)
	require.ErrorIs(t, err, api.ErrNotFound)
	_, err = w.Store.ControlOperation(ctx, id, api.CancelOperation)
	require.ErrorIs(t, err, api.ErrNotFound)
	l, err := w.Store.Operations(ctx, "", 10)
	require.NoError(t, err)
	require.Empty(t, l.Operations)
	_, err = w.Store.StartOperation(ctx, "x", api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{Tenant: "acme"}})
	require.ErrorIs(t, err, api.ErrTenant)

	for range 2 { // all partitions, and in pages
		w.start(auth.Principal{}, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
	}
	w.finish(lead)
	require.True(t, w.Group("globex4").Paused)
	var ids []string
	for cursor, first := "", true; first || cursor != ""; first = false {
		l, err := w.Store.Operations(stagetest.Trusted(t), cursor, 2)
		require.NoError(t, err)
		for _, o := range l.Operations {
			ids = append(ids, o.ID)
		}
		cursor = l.Cursor
	}
	require.Equal(t, []string{"o-3", "o-2", "o-1"}, ids)
	_, err = w.Store.Operations(ctx, "zz", 2)
	require.ErrorContains(t, err, "cursor: must be one that an earlier page gave")
	l, err = w.Store.Operations(ctx, "019c0000-0000-7000-8000-000000000000", 2)
	require.NoError(t, err)
	require.Empty(t, l.Operations)
	for range api.MaxTenantOperations {
		w.start(globex, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
	}
	_, err = w.Store.StartOperation(ctx, "y", api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
	require.ErrorContains(t, err, "10 operations of your tenant have not ended")
}

// TestDamagedOperations: an operation that can't be read is set aside with the reason, and the others go
// on. So does a group that can't be read.
func TestDamagedOperations(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		ctx, c := t.Context(), w.Conn.Cmd
		w.Jobs("good", "T", 1)
		w.Jobs("bad", "T", 1)
		require.NoError(t, c.Del(ctx, w.P.Group("bad")).Err())
		require.NoError(t, c.Set(ctx, w.P.Group("bad"), "x", 0).Err())
		pause := api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}}
		for _, damage := range []struct{ field, value, says string }{
			{"do", "explode", "does not say"},
			{"filter", "{", "filter"},
			{"state", "FLYING", "state"},
			{"changed", "7", "counts disagree"},
			{"skipped:ended", "-1", "counts disagree"},
			{"examined", "-1", "no count"},
			{"cursor", "x", "cursor"},
			{"cursor", "99|x", "cursor"},
			{"page", "{", "page"},
			{"page", `{"partition": 5}`, "page"},
			{"page", "null", "page"},
		} {
			id := w.start(auth.Principal{}, pause)
			require.NoError(t, c.HSet(ctx, w.P.Operation(id), damage.field, damage.value).Err())
			w.finish(w.lead("a"))
			o := w.get(id)
			require.Equal(t, api.OperationFailed, o.State, damage.value)
			require.Contains(t, o.Error, damage.says)
		}
		str, none := w.start(auth.Principal{}, pause), w.start(auth.Principal{}, pause)
		require.NoError(t, c.Del(ctx, w.P.Operation(str), w.P.Operation(none)).Err())
		require.NoError(t, c.Set(ctx, w.P.Operation(str), "x", 0).Err())
		require.Len(t, w.violations(), 2, "an audit finds them")
		id := w.start(auth.Principal{KeyID: "k", Role: auth.Producer, Tenant: "acme"}, pause)
		w.finish(w.lead("a"))
		require.Equal(t, api.OperationFailed, w.get(str).State)
		require.Equal(t, map[string]int64{api.SkipUnreadable: 1}, reasons(w.get(id)))
		require.EqualValues(t, 1, w.get(id).Changed)
		require.True(t, w.Group("good").Paused)
		require.NoError(t, c.Del(ctx, w.P.Operation(str)).Err())
		require.NoError(t, w.runner(w.Conn).Forget(ctx))
		require.Empty(t, w.violations())
	})
}

// TestForget: of the ended operations those of the last week stay, and the newest thousand.
func TestForget(t *testing.T) {
	both(t, func(t testing.TB, w world) {
		lead := w.lead("a")
		var ids []string
		for range 3 {
			ids = append(ids, w.start(auth.Principal{}, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}}))
		}
		w.finish(lead)
		open := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{All: true}})
		require.NoError(t, w.Conn.Cmd.HSet(t.Context(), w.P.Operation(ids[0]), "ended", time.Now().Add(-8*24*time.Hour).UnixMilli()).Err())
		require.NoError(t, w.runner(w.Conn).Forget(t.Context()))
		left, err := ledger.AllOperations(t.Context(), w.Conn.Cmd, w.Space)
		require.NoError(t, err)
		require.Equal(t, []string{open, ids[2], ids[1]}, left)
		require.NoError(t, ledger.ForgetOperations(t.Context(), w.Conn.Cmd, w.Space, time.Time{}, 2))
		left, err = ledger.AllOperations(t.Context(), w.Conn.Cmd, w.Space)
		require.NoError(t, err)
		require.Equal(t, []string{open, ids[2]}, left)
		keys, err := w.Conn.Cmd.Keys(t.Context(), w.P.Operation("*")).Result()
		require.NoError(t, err)
		require.ElementsMatch(t, []string{w.P.Operation(open), w.P.Operation(ids[2])}, keys)
	})
}

// TestOutOfMemory: while Redis has no memory, an operation waits, and a page that is done is counted.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	srv := redistest.Server(t)
	w := world{World: stagetest.New(t, srv.URL(), "b:", 1)}
	ctx := t.Context()
	w.failed(1, named("g", 3)...)
	id := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpRetry, Filter: api.OperationFilter{All: true}})
	cancel := w.start(auth.Principal{}, api.OperationRequest{Do: api.OpCancel, Filter: api.OperationFilter{All: true}})
	lead, r := w.lead("a"), w.runner(w.Conn)
	full := func(on bool) {
		require.NoError(t, w.Conn.Cmd.ConfigSet(ctx, "maxmemory", map[bool]string{true: "1", false: "0"}[on]).Err())
	}
	steps := func() (err error) {
		for worked := true; worked && err == nil; {
			worked, err = r.Step(ctx, lead)
		}
		return err
	}
	full(true)
	require.ErrorContains(t, steps(), "OOM")
	full(false)
	for range 2 { // both plan
		_, err := r.Step(ctx, lead)
		require.NoError(t, err)
	}
	full(true)
	require.ErrorContains(t, steps(), "OOM", "jobs can't be taken in")
	require.Equal(t, api.OperationCompleted, w.get(cancel).State, "it could act and count")
	require.Equal(t, map[string]int64{api.SkipEnded: 3}, reasons(w.get(cancel)))
	full(false)
	w.finish(lead)
	require.EqualValues(t, 3, w.get(id).Changed)
}

// TestBadRequests: an error names the field and what it may be.
func TestBadRequests(t *testing.T) {
	w := world{World: stagetest.Parallel(t, 1)}
	now := time.Now()
	for _, c := range []struct {
		do     string
		filter api.OperationFilter
		want   string
	}{
		{"explode", api.OperationFilter{All: true}, "do: must be one of cancel, pause"},
		{api.OpPause, api.OperationFilter{}, `filter: matches everything`},
		{api.OpPause, api.OperationFilter{All: true, Tenant: "t"}, "filter.all: must be alone"},
		{api.OpPause, api.OperationFilter{Tenant: "a/b"}, "filter.tenant: must match"},
		{api.OpPause, api.OperationFilter{Status: "FLYING"}, "filter.status: must be CREATED"},
		{api.OpPause, api.OperationFilter{Since: &now, Until: &now}, "filter.until: must be later than since"},
		{api.OpPause, api.OperationFilter{Tags: api.Tags{"a b": "v"}}, "filter.tags: must be KEY=VALUE"},
		{api.OpDeleteDeadLetters, api.OperationFilter{Tags: api.Tags{"a": "v"}}, "filter.tags: not of dead letters"},
		{api.OpPause, api.OperationFilter{Group: "g"}, "filter.group: only of dead letters"},
		{api.OpPause, api.OperationFilter{Code: strings.Repeat("x", 129)}, "filter.code: must be at most 128 bytes"},
		{api.OpDeleteDeadLetters, api.OperationFilter{Status: "FAILED"}, "filter.status: not of dead letters"},
		{api.OpRetryDeadLetters, api.OperationFilter{Paused: new(true)}, "filter.paused: not of dead letters"},
	} {
		_, err := w.Store.StartOperation(stagetest.Trusted(t), "o", api.OperationRequest{Do: c.do, Filter: c.filter})
		require.ErrorContains(t, err, c.want)
		_, ok := errors.AsType[*messages.ValidationError](err)
		require.True(t, ok)
	}
	ids, err := ledger.AllOperations(t.Context(), w.Conn.Cmd, w.Space)
	require.NoError(t, err)
	require.False(t, slices.Contains(ids, "o"))
}
