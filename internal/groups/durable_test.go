package groups_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redistest"
	"github.com/bulkaction/bulkaction/internal/stagetest"
)

// replicated is an installation whose writes must reach a replica.
func replicated(t *testing.T, partitions int) (w *stagetest.World, replica *redistest.Redis) {
	t.Helper()
	master := redistest.Server(t, redistest.Args("--repl-diskless-sync-delay", "0"))
	replica = redistest.Server(t, redistest.Args("--replicaof", strings.Replace(master.Addr(), ":", " ", 1)))
	w = stagetest.New(t, master.URL(), "t:", partitions)
	for range 2 { // one that has just come has all that was there; only then it is sent what comes
		w.Await("a replica", func() bool {
			have, err := w.Conn.AwaitReplicas(t.Context(), w.P.Waited(), 1, 2*time.Second, func(redis.Pipeliner) {})
			return err == nil && have == 1
		})
	}
	w.Store = w.NewStore(groups.Config{KeepIdempotencyKeys: time.Hour, WaitReplicas: 1, WaitTimeout: 500 * time.Millisecond})
	return w, replica
}

// Everything that can be accepted is refused while the replica is silent, and goes through when it is repeated.
func TestNothingIsAcceptedWithoutReplicas(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w, replica := replicated(t, 3)
	for _, g := range []string{"open", "doomed", "pausing", "paused", "failed"} {
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: g, Tenant: "acme", Type: g, Jobs: stagetest.Numbered(1), Seal: g == "failed"}, now)
		require.NoError(t, err)
	}
	_, err := w.Store.Pause(ctx, "paused")
	require.NoError(t, err)
	calls := map[string]func() error{
		"submit": func() error { _, err := w.Store.Submit(ctx, large(500), now); return err },
		"submit without jobs": func() error {
			_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "empty", Type: "T", Seal: true}, now)
			return err
		},
		"append":       func() error { return w.Store.Append(ctx, "open", stagetest.Numbered(300), "r", now) },
		"append entry": func() error { return w.Store.AppendEntry(ctx, "open", stagetest.Numbered(1), "1-1", "", now) },
		"append message": func() error {
			return w.Store.AppendEntry(ctx, "open", stagetest.Numbered(1), "1-2", "mine", now)
		},
		"seal with total": func() error { total := int64(900); _, err := w.Store.Seal(ctx, "pausing", &total); return err },
		"cancel":          func() error { _, err := w.Store.Cancel(ctx, "doomed"); return err },
		"pause":           func() error { _, err := w.Store.Pause(ctx, "pausing"); return err },
		"resume":          func() error { _, err := w.Store.Resume(ctx, "paused"); return err },
	}
	replica.Suspend()
	for name, call := range calls {
		err := call()
		require.ErrorIs(t, err, api.ErrUnavailable, name)
		require.ErrorContains(t, err, "0 replicas have", name)
	}
	replica.Resume()
	w.Await("the replica", func() bool { return calls["submit"]() == nil })
	for name, call := range calls {
		require.NoError(t, call(), name)
	}
	require.EqualValues(t, 500, w.Counts("g").Accepted, "nothing came twice")
	require.EqualValues(t, 303, w.Counts("open").Accepted)
	_, err = w.Store.Seal(ctx, "open", nil)
	require.NoError(t, err)
	slave := replica.Client()
	for _, g := range []string{"g", "empty", "open"} { // what was answered for, the replica has
		p := w.Space.OfTenant(w.Group(g).Tenant)
		require.Equal(t, w.Conn.Cmd.HGet(ctx, p.Group(g), "accepted").Val(), slave.HGet(ctx, p.Group(g), "accepted").Val())
		require.Equal(t, w.Group(g).Tenant, slave.Get(ctx, w.Space.OfGroup(g).Owner(g)).Val())
	}
}

// forgetful loses keys just before replicas are asked for, as a failover does that comes between a write and its wait.
type forgetful struct {
	client *redis.Client
	keys   atomic.Pointer[[]string]
}

func (f *forgetful) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (f *forgetful) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (f *forgetful) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[len(cmds)-1].Name() == "wait" {
			if keys := f.keys.Swap(nil); keys != nil {
				f.client.Del(ctx, *keys...)
			}
		}
		return next(ctx, cmds)
	}
}

func TestWhatAFailoverLostIsNotAccepted(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w, _ := replicated(t, 1)
	f := &forgetful{client: w.Connect().Cmd.(*redis.Client)}
	w.Conn.Cmd.AddHook(f)
	submit := func() error { _, err := w.Store.Submit(ctx, large(3), now); return err }
	add := func() error { return w.Store.Append(ctx, "o", stagetest.Numbered(1), "r", now) }
	_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "o", Type: "T"}, now)
	require.NoError(t, err)

	f.keys.Store(&[]string{w.P.Group("g"), w.P.States("g"), w.P.Queue("g", "T")})
	require.ErrorContains(t, submit(), "a failover has lost what was written to partition 0: repeat it")
	f.keys.Store(&[]string{w.P.Messages()})
	require.ErrorIs(t, add(), api.ErrUnavailable)
	require.NoError(t, submit())
	require.NoError(t, add())
}

// Those who come while others wait share the next wait, and each gets its own answer.
func TestWaitsAreShared(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w, replica := replicated(t, 1)
	w.Store = w.NewStore(groups.Config{WaitReplicas: 1, WaitTimeout: stagetest.Patience})
	replica.Suspend()
	const n = 50
	var answers sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		answers.Go(func() {
			_, errs[i] = w.Store.Submit(ctx, &messages.SubmitGroup{ID: fmt.Sprint("g", i), Type: "T", Jobs: stagetest.Numbered(1)}, now)
		})
	}
	w.Await("all to be stored", func() bool { return w.Conn.Cmd.ZCard(ctx, w.P.Groups()).Val() == n })
	replica.Resume()
	answers.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	var waits int
	stats := w.Conn.Cmd.Info(ctx, "commandstats").Val()
	_, rest, _ := strings.Cut(stats, "cmdstat_wait:calls=")
	_, err := fmt.Sscanf(rest, "%d", &waits)
	require.NoError(t, err)
	require.Less(t, waits, n, "%s", rest)
}
