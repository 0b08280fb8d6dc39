package groups_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

// poisoned is a Redis client with which each script call fails whose arguments contain a certain
// payload.
type poisoned struct {
	redis.Cmdable
	payload string
}

type refusal string

func (r refusal) Error() string { return string(r) }
func (refusal) RedisError()     {}

func (c poisoned) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	if strings.Contains(fmt.Sprintf("%s", args), c.payload) {
		return failed(ctx, refusal("ERR this is not for Redis"))
	}
	return c.Cmdable.EvalSha(ctx, sha, keys, args...)
}

func open(w *stagetest.World, g messages.SubmitGroup) {
	w.T.Helper()
	_, err := w.Store.Submit(context.WithoutCancel(stagetest.Trusted(w.T)), &g, now)
	require.NoError(w.T, err)
}

// appendEntry appends the jobs of one entry. message is the message's own id, or "".
func appendEntry(ctx context.Context, s *groups.Store, group string, jobs []messages.Job, entry, message string, o groups.Origin) error {
	return s.AppendEntries(ctx, group, []groups.EntryJobs{{Entry: entry, Message: message, Jobs: jobs, Origin: o}})[0]
}

// TestAppendsTogether: 101 concurrent appends, which may share script calls, are accepted or
// refused separately, each as a whole. A message that comes again is stored once.
func TestAppendsTogether(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(t))
		total := int64(30)
		open(w, messages.SubmitGroup{ID: "announced", Tenant: "acme", Type: "T", Total: &total})
		open(w, messages.SubmitGroup{ID: "open", Tenant: "other", Type: "T"})
		s := groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, reducer.NewRegistry(), poisoned{w.Conn.Cmd, "poison"})
		published := groups.Origin{At: now.At, Published: true}
		var (
			all  sync.WaitGroup
			mu   sync.Mutex
			errs = map[string][]error{}
		)
		add := func(what, group, entry, message string, jobs []messages.Job) {
			all.Go(func() {
				err := appendEntry(ctx, s, group, jobs, entry, message, published)
				mu.Lock()
				defer mu.Unlock()
				errs[what] = append(errs[what], err)
			})
		}
		for i := range 20 {
			entry := fmt.Sprintf("1-%d", i) // the id of one entry
			add("open", "open", entry, "", stagetest.Numbered(2))
			add("open", "open", entry, "", stagetest.Numbered(2)) // delivered twice
			add("named", "open", "2-"+entry[2:], "same", stagetest.Numbered(1))
			add("announced", "announced", "4-"+entry[2:], "", stagetest.Numbered(3)) // ten of them fit
			add("unknown", "nobody's", "6-"+entry[2:], "", stagetest.Numbered(1))
		}
		add("poison", "open", "3-0", "", []messages.Job{{Payload: []byte(`"poison"`)}})
		all.Wait()
		count := func(what string, target error) (n int) {
			for _, err := range errs[what] {
				if target == nil {
					require.NoError(t, err, what)
				} else if err != nil {
					require.ErrorIs(t, err, target, what)
					n++
				}
			}
			return n
		}
		count("open", nil)
		count("named", nil)
		require.Equal(t, 10, count("announced", api.ErrSealed))
		require.Equal(t, 20, count("unknown", api.ErrNotFound))
		require.ErrorContains(t, errs["poison"][0], "not for Redis")
		require.Equal(t, api.Counts{Accepted: 41, Waiting: 41}, w.Counts("open"))
		require.Equal(t, api.Counts{Accepted: 30, Waiting: 30}, w.Counts("announced"))
	})
}

// TestRefusedAppendBesidePoison: of two messages in one call, Redis refuses the first, and the
// second has more jobs than the group's total. Each gets its own error, and no job is stored.
func TestRefusedAppendBesidePoison(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		total := int64(1)
		open(w, messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Total: &total})
		s := groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, reducer.NewRegistry(), poisoned{w.Conn.Cmd, "poison"})
		errs := s.AppendEntries(context.WithoutCancel(stagetest.Trusted(t)), "g", []groups.EntryJobs{
			{Entry: "1-1", Jobs: []messages.Job{{Payload: []byte(`"poison"`)}}, Origin: now},
			{Entry: "1-2", Jobs: stagetest.Numbered(2), Origin: now}, // more than the total
		})
		require.ErrorContains(t, errs[0], "not for Redis")
		require.ErrorIs(t, errs[1], api.ErrConflict)
		require.Equal(t, api.Counts{}, w.Counts("g"))
	})
}

// TestSubmissionsTogether: concurrent submissions share script calls. Each is accepted or refused on its
// own: what Redis refuses, what conflicts and what belongs to another tenant harms no other one.
func TestSubmissionsTogether(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	ctx := context.WithoutCancel(stagetest.Trusted(t))
	open(w, messages.SubmitGroup{ID: "conflict", Tenant: "acme", Type: "T"})
	open(w, messages.SubmitGroup{ID: "foreign", Tenant: "globex", Type: "T"})
	counted := &connection{Cmdable: poisoned{w.Conn.Cmd, "poison"}, left: -1}
	s := groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, reducer.NewRegistry(), counted)
	const n = 300
	all := make([]groups.Submission, 0, n)
	add := func(id string, jobs ...messages.Job) {
		g := &messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T", Jobs: jobs, Seal: true}
		all = append(all, groups.Submission{Group: g, Origin: groups.Origin{At: now.At, Published: true}})
	}
	for i := range n {
		add(fmt.Sprint("g", i%(n-10)), stagetest.Numbered(2)...) // ten come twice
	}
	add("poison", messages.Job{Payload: []byte(`"poison"`)})
	add("conflict", stagetest.Numbered(2)...)
	add("foreign", stagetest.Numbered(2)...)
	add("large", stagetest.Numbered(2*ledger.MaxAppend)...)
	add("empty")
	check := func(errs []error) {
		for i, err := range errs {
			switch all[i].Group.ID {
			case "poison":
				require.ErrorContains(t, err, "not for Redis")
			case "conflict", "foreign":
				require.ErrorIs(t, err, api.ErrConflict)
			default:
				require.NoError(t, err)
			}
		}
	}
	check(s.SubmitAll(ctx, all))
	// One call has 32 groups at most; a call with the poison is repeated one by one.
	require.Less(t, counted.scripts, n/ledger.MaxSubmit+2*ledger.MaxSubmit+10)
	check(s.SubmitAll(ctx, all))
	errs := make([]error, len(all))
	var calls sync.WaitGroup
	for i, sub := range all {
		calls.Go(func() { _, errs[i] = s.Submit(ctx, sub.Group, sub.Origin) })
	}
	calls.Wait()
	check(errs)
	for i := range n - 10 {
		require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, w.Counts(fmt.Sprint("g", i)))
	}
	require.EqualValues(t, 2*ledger.MaxAppend, w.Counts("large").Accepted)
	require.True(t, w.Group("empty").Sealed)
	require.Equal(t, "globex", w.Group("foreign").Tenant)
}

// TestAppendFollowsAGroup: when a group was deleted and a tenant of another partition has used its
// id again, an append finds the new group.
func TestAppendFollowsAGroup(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		w := stagetest.New(t, url, prefix, 4)
		ctx := context.WithoutCancel(stagetest.Trusted(t))
		open(w, messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T"})
		require.NoError(t, w.Store.Append(ctx, "g", stagetest.Numbered(1), "1", now))
		old := w.Space.OfTenant("acme")
		require.NoError(t, w.Conn.Cmd.Del(ctx, old.Group("g"), w.Space.OfGroup("g").Owner("g")).Err())
		require.ErrorIs(t, w.Store.Append(ctx, "g", stagetest.Numbered(1), "2", now), api.ErrNotFound)
		tenant := 0
		for w.Space.OfTenant(fmt.Sprint(tenant)).Index() == old.Index() {
			tenant++
		}
		open(w, messages.SubmitGroup{ID: "g", Tenant: fmt.Sprint(tenant), Type: "T"})
		require.NoError(t, w.Store.Append(ctx, "g", stagetest.Numbered(1), "2", now))
		require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts("g"))
	})
}

func BenchmarkAppendTogether(b *testing.B) {
	w := stagetest.Shared(b)
	ctx := context.WithoutCancel(stagetest.Trusted(b))
	open(w, messages.SubmitGroup{ID: "bench", Tenant: "acme", Type: "T"})
	jobs := stagetest.Numbered(1)
	published := groups.Origin{At: now.At, Published: true}
	b.ReportAllocs()
	b.SetParallelism(200)
	var n sync.Mutex
	i := 0
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			n.Lock()
			i++
			entry := fmt.Sprintf("5-%d", i)
			n.Unlock()
			if err := appendEntry(ctx, w.Store, "bench", jobs, entry, "", published); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func TestBacklogIsBounded(t *testing.T) {
	w := stagetest.Parallel(t, 3)
	w.Store = w.NewStore(groups.Config{MaxBacklog: 10})
	submit := func(id string, n int) error {
		ctx, request := backpressure.WithRequest(stagetest.Trusted(t), id, true)
		defer request.End()
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Type: "T", Jobs: stagetest.Numbered(n)}, now)
		return err
	}
	require.NoError(t, submit("a", 4))
	require.NoError(t, submit("b", 4)) // by the same view of the backlog
	var full *api.BackpressureError
	require.ErrorAs(t, submit("c", 4), &full)
	require.Equal(t, 10*time.Second, full.RetryAfter) // no worker has reported that it starts jobs
	require.NoError(t, submit("c", 2))
	require.ErrorAs(t, w.Store.Append(stagetest.Trusted(t), "c", stagetest.Numbered(1), "r", now), &full)
	require.ErrorIs(t, submit("d", 11), api.ErrInvalid) // more than the backlog may ever have

	// The Retry-After is the time in which workers start the jobs above the limit, plus a margin,
	// in whole seconds.
	require.NoError(t, presence.PublishWorker(stagetest.Trusted(t), w.Conn, w.Space, presence.WorkerReport{
		WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"T"}}, StartedPerSecond: map[string]float64{"T": 2}}))
	w.Await("a view with the worker's report", func() bool {
		require.ErrorAs(t, submit("d", 6), &full)
		return full.RetryAfter == 5*time.Second
	})
	w.Admit("T") // ready jobs are still in the backlog
	<-time.After(300 * time.Millisecond)
	require.ErrorAs(t, submit("d", 1), &full)

	// Jobs in flight are not in the backlog.
	for _, p := range w.Space.All() {
		w.P = p
		n, err := w.Conn.Cmd.XLen(stagetest.Trusted(t), p.Ready("T")).Result()
		require.NoError(t, err)
		w.Take("T", "c", int(n))
	}
	w.Await("an empty backlog", func() bool { return submit("d", 10) == nil })
}

func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	const memory, piece = 64 << 20, 1 << 20
	server := redistest.Server(t, redistest.MaxMemory(memory), redistest.Args("--maxmemory-policy", "noeviction"))
	w := stagetest.New(t, server.URL(), "t:", 1)
	w.Store = w.NewStore(groups.Config{MaxMemoryRatio: 0.5})
	submitted := 0
	submit := func(s *groups.Store) error {
		submitted++
		_, err := s.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: fmt.Sprint("g", submitted), Type: "T", Jobs: stagetest.Numbered(1)}, now)
		return err
	}
	require.NoError(t, submit(w.Store))
	for i := range memory / 2 / piece {
		require.NoError(t, w.Conn.Cmd.Set(stagetest.Trusted(t), fmt.Sprint("ballast", i), strings.Repeat("x", piece), 0).Err())
	}
	var full *api.BackpressureError
	w.Await("full memory", func() bool { return submit(w.Store) != nil })
	require.ErrorAs(t, submit(w.Store), &full)
	require.Contains(t, full.Reason, "up to 50%")

	// A store without a limit of memory use returns a BackpressureError when Redis is out of
	// memory.
	blind := w.NewStore(groups.Config{})
	var err error
	w.Await("Redis to be full", func() bool {
		for size := piece; size > 16; size /= 4 {
			for i := 0; w.Conn.Cmd.Set(stagetest.Trusted(t), fmt.Sprint("ballast-", size, "-", i), strings.Repeat("x", size), 0).Err() == nil; i++ {
			}
		}
		err = submit(blind)
		return err != nil
	})
	require.ErrorAs(t, err, &full)
	require.Equal(t, "Redis is out of memory", full.Reason)
	refused := fmt.Sprint("g", submitted)
	// So it does for a group whose owner another partition keeps.
	many := stagetest.New(t, server.URL(), "m:", 4)
	for i := range 4 {
		_, err = many.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: fmt.Sprint("g", i), Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)}, now)
		require.ErrorAs(t, err, &full)
		require.Equal(t, "Redis is out of memory", full.Reason)
	}

	keys, err := w.Conn.Cmd.Keys(stagetest.Trusted(t), "ballast*").Result()
	require.NoError(t, err)
	require.NoError(t, w.Conn.Cmd.Del(stagetest.Trusted(t), keys...).Err())
	w.Await("free memory", func() bool { return submit(w.Store) == nil })
	// The submission that failed because Redis was out of memory succeeds when it is repeated.
	_, err = w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: refused, Type: "T", Jobs: stagetest.Numbered(1)}, now)
	require.NoError(t, err)
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts(refused))
}
