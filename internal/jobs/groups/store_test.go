package groups_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// connection is a faulty Redis client: from a chosen script on calls fail before they reach Redis,
// or each script's first reply is lost.
type connection struct {
	redis.Cmdable
	mu          sync.Mutex
	left        int  // scripts that still reach Redis; negative: all
	loseReplies bool // each script's first reply is lost
	lost        bool
	scripts     int
}

func (c *connection) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	return c.eval(ctx, func() *redis.Cmd { return c.Cmdable.EvalSha(ctx, sha, keys, args...) })
}

func (c *connection) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	return c.eval(ctx, func() *redis.Cmd { return c.Cmdable.Eval(ctx, script, keys, args...) })
}

func (c *connection) eval(ctx context.Context, do func() *redis.Cmd) *redis.Cmd {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left == 0 {
		return failed(ctx, errors.New("the process has died"))
	}
	cmd := do()
	if call.IsNoScript(cmd.Err()) {
		return cmd // the caller sends the script again in full
	}
	c.scripts++
	c.left--
	if c.loseReplies && !c.lost {
		c.lost = true
		return failed(ctx, io.EOF)
	}
	c.lost = false
	return cmd
}

func failed(ctx context.Context, err error) *redis.Cmd {
	cmd := redis.NewCmd(ctx)
	cmd.SetErr(err)
	return cmd
}

// through returns a store whose submissions and appends use the faulty connection c.
func through(w *stagetest.World, c *connection) *groups.Store {
	c.Cmdable = w.Conn.Cmd
	return groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, reducer.NewRegistry(), c)
}

var now = groups.Origin{At: time.Now()}

func large(n int) *messages.SubmitGroup {
	return &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Seal: true, Jobs: stagetest.Numbered(n)}
}

// holds checks that all n jobs of a group are waiting: the group's queue has each of them once and
// in order.
func holds(w *stagetest.World, group string, n int) {
	w.T.Helper()
	require.Equal(w.T, api.Counts{Accepted: int64(n), Waiting: int64(n)}, w.Counts(group))
	blobs, err := w.Conn.Cmd.LRange(context.WithoutCancel(stagetest.Trusted(w.T)), w.P.Queue(group, "T"), 0, -1).Result()
	require.NoError(w.T, err)
	require.Len(w.T, blobs, n)
	for i, blob := range blobs {
		part := strings.SplitN(blob, "|", 4)
		require.Equal(w.T, fmt.Sprint(i), part[0])
		require.Equal(w.T, fmt.Sprint(i), part[3])
	}
}

// TestSubmitIsRepeatedAfterACrash: a submission that is too large for one script is stored in
// pieces. After a crash between two pieces, the repeated submission stores the missing ones.
func TestSubmitIsRepeatedAfterACrash(t *testing.T) {
	t.Parallel()
	const n, pieces = 2*ledger.MaxAppend + 50, 3
	for died := range pieces { // the number of scripts before the crash; the first one creates the group
		t.Run(fmt.Sprint("after ", died), func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			_, err := through(w, &connection{left: died}).Submit(stagetest.Trusted(t), large(n), now)
			require.ErrorContains(t, err, "the process has died")
			for range 2 {
				accepted, err := w.Store.Submit(stagetest.Trusted(t), large(n), now)
				require.NoError(t, err)
				require.Equal(t, "g", accepted.ID)
				holds(w, "g", n)
			}
			require.True(t, w.Group("g").Sealed)
		})
	}
}

func TestSubmitOutlivesLostReplies(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	c := &connection{left: -1, loseReplies: true}
	_, err := through(w, c).Submit(stagetest.Trusted(t), large(2*ledger.MaxAppend+50), now)
	require.NoError(t, err)
	require.Equal(t, 6, c.scripts) // each of the three scripts twice
	holds(w, "g", 2*ledger.MaxAppend+50)
}

// TestSubmitCutsBySize: jobs with large payloads are divided into pieces by size: 20 jobs of 256
// KiB are stored in 5 pieces.
func TestSubmitCutsBySize(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	payload := []byte(`"` + strings.Repeat("x", messages.MaxPayloadBytes-2) + `"`)
	jobs := make([]messages.Job, 20)
	for i := range jobs {
		jobs[i].Payload = payload
	}
	c := &connection{left: -1}
	_, err := through(w, c).Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Seal: true, Jobs: jobs}, now)
	require.NoError(t, err)
	require.Equal(t, 5, c.scripts)
	require.Equal(t, api.Counts{Accepted: 20, Waiting: 20}, w.Counts("g"))
	require.EqualValues(t, 20, w.Conn.Cmd.HLen(stagetest.Trusted(t), w.P.Payloads("g")).Val())
}

func TestSubmitConflicts(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		_, err := w.Store.Submit(ctx, large(3), now)
		require.NoError(w.T, err)
		_, err = w.Store.Submit(ctx, large(4), now)
		require.ErrorIs(w.T, err, api.ErrConflict)
		other := large(3)
		other.Tenant = "other"
		_, err = w.Store.Submit(ctx, other, now)
		require.ErrorIs(w.T, err, api.ErrConflict)
		holds(w, "g", 3)
	})
}

// TestSubmitWithoutATenant: a group that is submitted without a tenant belongs to the tenant with
// the group's id. A repeated submission that names this tenant is a duplicate, not a conflict.
func TestSubmitWithoutATenant(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	for _, tenant := range []string{"", "g"} {
		_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Tenant: tenant, Type: "T", Jobs: stagetest.Numbered(1)}, now)
		require.NoError(t, err)
	}
	require.Equal(t, "g", w.Group("g").Tenant)
	holds(w, "g", 1)
}

func TestSubmitWithoutJobs(t *testing.T) {
	t.Parallel()
	five := int64(5)
	zero := int64(0)
	for name, tt := range map[string]struct {
		group  messages.SubmitGroup
		sealed bool
	}{
		"open":           {messages.SubmitGroup{}, false},
		"sealed":         {messages.SubmitGroup{Seal: true}, true},
		"announced":      {messages.SubmitGroup{Total: &five}, false},
		"announced none": {messages.SubmitGroup{Total: &zero}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			tt.group.ID, tt.group.Type = "g", "T"
			for range 2 {
				_, err := w.Store.Submit(stagetest.Trusted(t), &tt.group, now)
				require.NoError(t, err)
			}
			require.Equal(t, tt.sealed, w.Group("g").Sealed)
			require.Equal(t, tt.group.Total, w.Group("g").Total)
		})
	}
}

func TestIdempotencyKey(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		submit := func(key, id string, n int) (string, error) {
			g := large(n)
			g.ID = id // like an id that the API generates
			o := now
			o.IdempotencyKey, o.GeneratedID = key, true
			accepted, err := w.Store.Submit(ctx, g, o)
			return accepted.ID, err
		}
		// Concurrent requests: one of them is the first.
		var wg sync.WaitGroup
		got := make([]string, 10)
		for i := range got {
			wg.Go(func() { got[i], _ = submit("k", fmt.Sprint("g", i), 5) })
		}
		wg.Wait()
		for _, id := range got {
			require.Equal(w.T, got[0], id)
		}
		holds(w, got[0], 5)
		require.EqualValues(w.T, 1, w.Conn.Cmd.ZCard(ctx, w.P.Groups()).Val())

		_, err := submit("k", "x", 6)
		require.ErrorIs(w.T, err, api.ErrConflict)
		other, err := submit("another", "y", 5)
		require.NoError(w.T, err)
		require.Equal(w.T, "y", other)
	})
}

// TestSubmissionHasCounts: the answer to a submission has the counts that its jobs had when they
// were accepted. A repeated request gets the same counts, whatever has happened to the jobs.
func TestSubmissionHasCounts(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		arrived := time.Now()
		soon, later, past := arrived.Add(time.Minute), arrived.Add(time.Hour), arrived.Add(-time.Hour)
		jobs := stagetest.Numbered(4)
		jobs[1].RunAt, jobs[2].RunAt, jobs[3].RunAt = &past, &soon, &later
		for group, c := range map[string]struct {
			runAt *time.Time
			want  api.Counts
		}{
			"now":   {nil, api.Counts{Accepted: 4, Waiting: 2, NonReady: 2}},
			"soon":  {&soon, api.Counts{Accepted: 4, Waiting: 3, NonReady: 1}},
			"later": {&later, api.Counts{Accepted: 4, Waiting: 4}},
		} {
			for i := range 2 {
				o := groups.Origin{IdempotencyKey: group, At: arrived.Add(time.Duration(i) * 2 * time.Hour)}
				g := messages.SubmitGroup{ID: group, Tenant: "acme", Type: "T", RunAt: c.runAt, Jobs: jobs, Seal: true}
				a, err := w.Store.Submit(stagetest.Trusted(w.T), &g, o)
				require.NoError(w.T, err)
				require.Equal(w.T, c.want, a.Counts, group)
				if i == 0 {
					require.Equal(w.T, c.want, w.Counts(group), "the answer agrees with the group")
					w.Admit("T")
				}
			}
		}
		require.EqualValues(w.T, 2, w.Counts("now").Ready)
		a, err := w.Store.Submit(stagetest.Trusted(w.T), &messages.SubmitGroup{ID: "empty", Type: "T"}, groups.Origin{At: arrived})
		require.NoError(w.T, err)
		require.Zero(w.T, a.Counts)
	})
}

// TestIdempotencyKeyOfAnEarlierVersion: records of idempotency keys that an earlier version has
// stored contain no time. A submission with such a key is answered as before.
func TestIdempotencyKeyOfAnEarlierVersion(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		o := now
		o.IdempotencyKey, o.At = "k", time.Now()
		past := o.At.Add(-time.Hour)
		submit := func() api.Accepted {
			jobs := stagetest.Numbered(2)
			jobs[1].RunAt = &past
			a, err := w.Store.Submit(stagetest.Trusted(w.T), &messages.SubmitGroup{ID: "g", Type: "T", Jobs: jobs, Seal: true}, o)
			require.NoError(w.T, err)
			return a
		}
		first := submit()
		keys := w.Conn.Cmd.Keys(stagetest.Trusted(w.T), w.Space.Idempotency("*")).Val()
		require.Len(w.T, keys, 1)
		record := stagetest.Decode[map[string]any](w.T, w.Conn.Cmd.Get(stagetest.Trusted(w.T), keys[0]).Val())
		delete(record, "at_ms")
		old, err := json.Marshal(record)
		require.NoError(w.T, err)
		require.NoError(w.T, w.Conn.Cmd.Set(stagetest.Trusted(w.T), keys[0], old, time.Hour).Err())
		require.Equal(w.T, first, submit())
	})
}

// TestInvalidUsesNoIdempotencyKey: an invalid submission does not use up its idempotency key.
func TestInvalidUsesNoIdempotencyKey(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	g := large(1)
	g.Aggregate = []messages.Aggregate{{As: "x", Op: "no-such"}}
	o := now
	o.IdempotencyKey = "k"
	_, err := w.Store.Submit(stagetest.Trusted(t), g, o)
	var invalid *messages.ValidationError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "aggregate", invalid.Fields[0].Field)
	g.Aggregate[0].Op = "count"
	_, err = w.Store.Submit(stagetest.Trusted(t), g, o)
	require.NoError(t, err)
}

func TestAppend(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T"}, now)
		require.NoError(w.T, err)
		for range 2 { // the same request, and the same entry, twice
			require.NoError(w.T, w.Store.Append(ctx, "g", stagetest.Numbered(250), "r", now))
			require.NoError(w.T, appendEntry(ctx, w.Store, "g", stagetest.Numbered(250), "1700000000000-0", "", now))
			require.NoError(w.T, appendEntry(ctx, w.Store, "g", stagetest.Numbered(250), "1700000000000-1", "m", now))
		}
		// The message's id decides, not the id of its entry.
		require.NoError(w.T, appendEntry(ctx, w.Store, "g", stagetest.Numbered(250), "1700000000000-2", "m", now))
		require.Equal(w.T, api.Counts{Accepted: 750, Waiting: 750}, w.Counts("g"))
		// Equal ids of different kinds of requests do not collide.
		require.NoError(w.T, w.Store.Append(ctx, "g", stagetest.Numbered(1), "m", now))
		require.NoError(w.T, appendEntry(ctx, w.Store, "g", stagetest.Numbered(1), "1700000000000-3", "r", now))
		require.Equal(w.T, api.Counts{Accepted: 752, Waiting: 752}, w.Counts("g"))

		_, err = w.Store.Seal(ctx, "g", nil)
		require.NoError(w.T, err)
		require.ErrorIs(w.T, w.Store.Append(ctx, "g", stagetest.Numbered(1), "late", now), api.ErrSealed)
		require.NoError(w.T, w.Store.Append(ctx, "g", stagetest.Numbered(250), "r", now)) // its jobs were stored before
		require.ErrorIs(w.T, w.Store.Append(ctx, "nobody", stagetest.Numbered(1), "r", now), api.ErrNotFound)
	})
}

// retryAll returns the command that runs all failed jobs of a group again.
func retryAll(s *groups.Store) func(context.Context, string) (api.Accepted, error) {
	return func(ctx context.Context, group string) (api.Accepted, error) {
		return s.Retry(ctx, group, api.RetryChoice{})
	}
}

// keyed returns n jobs whose keys are numbers from first on.
func keyed(first, n int) []messages.Job {
	jobs := stagetest.Numbered(n)
	for i := range jobs {
		jobs[i].Key = fmt.Sprint(first + i)
	}
	return jobs
}

// TestUniqueKeys: in a group with unique keys, jobs whose keys are taken are left out. The answer
// lists them by their index in the whole request, and a repeated request gets the same answer. Jobs
// are found by key and by state.
func TestUniqueKeys(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		for id, unique := range map[string]bool{"g": true, "h": false} {
			_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T", UniqueKeys: unique, Jobs: keyed(0, 300)}, now)
			require.NoError(w.T, err)
		}
		taken := func(err error) []int {
			var e *api.KeysTakenError
			require.ErrorAs(w.T, err, &e)
			require.ErrorIs(w.T, err, api.ErrConflict)
			return e.Jobs
		}
		want := []int{0, 1, 2, 3, 4}
		more := append(keyed(295, 245), keyed(10, 1)...) // two pieces
		for range 2 {
			require.Equal(w.T, append(slices.Clone(want), 245), taken(w.Store.Append(ctx, "g", more, "r", now)))
			require.Equal(w.T, want, taken(appendEntry(ctx, w.Store, "g", keyed(295, 10), "1700000000000-0", "", now))[:5])
			require.NoError(w.T, w.Store.Append(ctx, "h", more, "r", now))
		}
		require.EqualValues(w.T, 540, w.Counts("g").Accepted)
		require.ErrorContains(w.T, w.Store.Append(ctx, "g", keyed(0, 12), "r2", now), "jobs[9] and 2 more; the other jobs of the request were added")

		find := func(group string, q messages.JobQuery) []api.Job {
			q.Limit = 1000
			l, err := w.Store.Jobs(ctx, group, q)
			require.NoError(w.T, err)
			require.Empty(w.T, l.Cursor)
			return l.Jobs
		}
		found := find("g", messages.JobQuery{Key: "539"})
		require.Len(w.T, found, 1)
		require.Equal(w.T, []any{int64(539), "539", "waiting"}, []any{found[0].Ordinal, found[0].Key, found[0].State})
		require.Equal(w.T, "539", w.Job("g", 539).Key, "why shows the key of a waiting job")
		require.Empty(w.T, find("g", messages.JobQuery{Key: "nobody"}))
		require.Empty(w.T, find("g", messages.JobQuery{Key: "539", State: "failed"}))
		require.Len(w.T, find("g", messages.JobQuery{State: "waiting"}), 540)
		page, err := w.Store.Jobs(ctx, "g", messages.JobQuery{Limit: 7, Cursor: "533"})
		require.NoError(w.T, err)
		require.Len(w.T, page.Jobs, 7)

		var invalid *messages.ValidationError
		_, err = w.Store.Jobs(ctx, "h", messages.JobQuery{Key: "1", Limit: 1})
		require.ErrorAs(w.T, err, &invalid)
		require.Equal(w.T, "key", invalid.Fields[0].Field)
		_, err = w.Store.Jobs(ctx, "g", messages.JobQuery{Cursor: "-1", Limit: 1})
		require.ErrorAs(w.T, err, &invalid)
		_, err = w.Store.Jobs(ctx, "nobody", messages.JobQuery{Limit: 1})
		require.ErrorIs(w.T, err, api.ErrNotFound)
	})
}

func TestCommands(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		for _, command := range []func(context.Context, string) (api.Accepted, error){w.Store.Cancel, retryAll(w.Store)} {
			_, err := command(ctx, "nobody")
			require.ErrorIs(w.T, err, api.ErrNotFound)
		}
		w.Jobs("g", "T", 12_000) // more than one sweep settles
		w.Admit("T")
		_, err := w.Store.Retry(ctx, "g", api.RetryChoice{})
		require.ErrorIs(w.T, err, api.ErrConflict)
		accepted, err := w.Store.Cancel(ctx, "g")
		require.NoError(w.T, err)
		require.Equal(w.T, api.Accepted{ID: "g", Status: api.StatusCancelled, Counts: api.Counts{Accepted: 12_000, Cancelled: 12_000}}, accepted)
		require.Equal(w.T, api.Counts{Accepted: 12_000, Cancelled: 12_000}, w.Counts("g"))
		_, err = w.Store.Cancel(ctx, "g")
		require.NoError(w.T, err)

		_, err = w.Store.Submit(ctx, &messages.SubmitGroup{ID: "open", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(2)}, now)
		require.NoError(w.T, err)
		one, three := int64(1), int64(3)
		_, err = w.Store.Seal(ctx, "open", &one)
		require.ErrorIs(w.T, err, api.ErrConflict)
		_, err = w.Store.Seal(ctx, "open", &three)
		require.NoError(w.T, err)
		require.False(w.T, w.Group("open").Sealed)
		require.NoError(w.T, w.Store.Append(ctx, "open", stagetest.Numbered(1), "r", now))
		require.True(w.T, w.Group("open").Sealed)
	})
}

// TestRedisIsAway: while Redis does not answer, 10 concurrent submissions all get the error
// ErrUnavailable within 20 seconds.
func TestRedisIsAway(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	w := stagetest.New(t, server.URL(), "t:", 1)
	w.Store = w.NewStore(groups.Config{MaxBacklog: 1000})
	w.Jobs("g", "T", 1)
	server.Suspend()
	defer server.Resume()
	began := time.Now()
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			ctx := context.WithoutCancel(stagetest.Trusted(t))
			g := large(1)
			g.ID = fmt.Sprint("g", i)
			_, err := w.Store.Submit(ctx, g, now)
			if !errors.Is(err, api.ErrUnavailable) {
				t.Errorf("submit: got %v, want %v", err, api.ErrUnavailable)
			}
		})
	}
	wg.Wait()
	require.Less(t, time.Since(began), 20*time.Second) // a read fails after 3 seconds; one after the other they would take 30
}
