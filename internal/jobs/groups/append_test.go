package groups_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
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

// open submits a group that is not sealed.
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
