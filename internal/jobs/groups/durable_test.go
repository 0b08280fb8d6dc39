package groups_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

// replicated starts a master with one replica, and returns a world whose store waits until the
// replica has each write, for at most 500 ms.
func replicated(t *testing.T, partitions int) (w *stagetest.World, replica *redistest.Redis) {
	t.Helper()
	master := redistest.Server(t, redistest.Args("--repl-diskless-sync-delay", "0"))
	replica = redistest.Server(t, redistest.Args("--replicaof", strings.Replace(master.Addr(), ":", " ", 1)))
	w = stagetest.New(t, master.URL(), "t:", partitions)
	for range 2 { // a new replica first gets a copy of all data; only after that it gets new writes
		w.Await("a replica", func() bool {
			have, err := w.Conn.AwaitReplicas(stagetest.Trusted(t), w.P.Waited(), 1, 2*time.Second, func(redis.Pipeliner) {})
			return err == nil && have == 1
		})
	}
	w.Store = w.NewStore(groups.Config{KeepIdempotencyKeys: time.Hour, WaitReplicas: 1, WaitTimeout: 500 * time.Millisecond})
	return w, replica
}

// TestNothingIsAcceptedWithoutReplicas: while the replica does not answer, submissions, appends,
// seals, cancellations, pauses and resumptions get an error, although Redis may have stored them.
// The repeated request succeeds and stores nothing twice.
func TestNothingIsAcceptedWithoutReplicas(t *testing.T) {
	t.Parallel()
	ctx := auth.Trust(context.Background())
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
		"append entry": func() error { return appendEntry(ctx, w.Store, "open", stagetest.Numbered(1), "1-1", "", now) },
		"append message": func() error {
			return appendEntry(ctx, w.Store, "open", stagetest.Numbered(1), "1-2", "mine", now)
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
	require.EqualValues(t, 500, w.Counts("g").Accepted, "no job is stored twice")
	require.EqualValues(t, 303, w.Counts("open").Accepted)
	_, err = w.Store.Seal(ctx, "open", nil)
	require.NoError(t, err)
	slave := replica.Client()
	for _, g := range []string{"g", "empty", "open"} { // the replica has what was accepted
		p := w.Space.OfTenant(w.Group(g).Tenant)
		replicated, err := ledger.ReadProgress(ctx, slave, []ledger.GroupRef{{Partition: p, ID: g}})
		require.NoError(t, err)
		require.Equal(t, w.Counts(g).Accepted, replicated[0].Counts.Accepted)
		require.Equal(t, w.Group(g).Tenant, slave.Get(ctx, w.Space.OfGroup(g).Owner(g)).Val())
	}
}

// forgetful is a hook of the Redis client. It calls loss once, just before the next wait for
// replicas, to delete data like a failover between a write and its wait.
type forgetful struct {
	redistest.NoHook
	loss atomic.Pointer[func()]
}

func (f *forgetful) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[len(cmds)-1].Name() == "wait" {
			if lose := f.loss.Swap(nil); lose != nil {
				(*lose)()
			}
		}
		return next(ctx, cmds)
	}
}

// TestWhatAFailoverLostIsStoredAgain: the store detects that a failover has lost a write. It stores
// submissions and appends again; for the command pause it returns an error.
func TestWhatAFailoverLostIsStoredAgain(t *testing.T) {
	t.Parallel()
	ctx := auth.Trust(context.Background())
	w, _ := replicated(t, 1)
	c := w.Connect().Cmd
	f := &forgetful{}
	w.Conn.Cmd.AddHook(f)
	none := int64(0)
	submit := func(g *messages.SubmitGroup) func() error {
		return func() error { _, err := w.Store.Submit(ctx, g, now); return err }
	}
	empty := func(id string, seal bool, total *int64) *messages.SubmitGroup {
		return &messages.SubmitGroup{ID: id, Type: "T", Seal: seal, Total: total}
	}
	require.NoError(t, submit(&messages.SubmitGroup{ID: "o", Tenant: "acme", Type: "T"})())
	lost := false
	meet := func(loss func() error, call func() error) error {
		lost = false
		lose := func() { lost = loss() == nil }
		f.loss.Store(&lose)
		return call()
	}
	drop := func(keys ...string) func() error { return func() error { return c.Del(ctx, keys...).Err() } }
	unseal := func(group string) func() error {
		return func() error { stagetest.Unseal(t, c, w.P, group); return nil }
	}
	for name, tt := range map[string]struct{ loss, call func() error }{
		"group":        {drop(w.P.Group("g"), w.P.States("g"), w.P.Queue("g", "T")), submit(large(3))},
		"owner":        {drop(w.P.Owner("open")), submit(empty("open", false, nil))},
		"seal":         {unseal("sealed"), submit(empty("sealed", true, nil))},
		"seal of none": {unseal("none"), submit(empty("none", false, &none))},
		"append":       {drop(w.P.Messages()), func() error { return w.Store.Append(ctx, "o", stagetest.Numbered(1), "r", now) }},
		"entry":        {drop(w.P.Entries()), func() error { return appendEntry(ctx, w.Store, "o", stagetest.Numbered(1), "1-1", "", now) }},
	} {
		require.NoError(t, meet(tt.loss, tt.call), name)
		require.True(t, lost, name)
	}
	require.EqualValues(t, 3, w.Counts("g").Accepted)
	require.Equal(t, "open", c.Get(ctx, w.P.Owner("open")).Val())
	require.True(t, w.Group("sealed").Sealed)
	require.True(t, w.Group("none").Sealed)
	require.EqualValues(t, 1, c.ZCard(ctx, w.P.Messages()).Val())
	require.EqualValues(t, 1, c.ZCard(ctx, w.P.Entries()).Val())

	err := meet(func() error { stagetest.Unpause(t, c, w.P, "o"); return nil }, func() error { _, err := w.Store.Pause(ctx, "o"); return err })
	require.ErrorIs(t, err, api.ErrUnavailable)
	require.ErrorContains(t, err, "a failover has lost what was written to partition 0: repeat it")
}

// dying is a Redis client that answers OK to some scripts without running them, like a master that
// dies before its replica has the writes. unheard chooses these calls by their number, from 0.
type dying struct {
	redis.Cmdable
	unheard func(script int) bool
	scripts int
	gap     func() // called when a script has replied GAP
}

func (d *dying) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	d.scripts++
	if d.unheard(d.scripts - 1) {
		cmd := redis.NewCmd(ctx)
		cmd.SetVal([]any{[]any{"OK", "CREATED", []any{"OK", int64(0), int64(ledger.MaxAppend)}}})
		return cmd
	}
	cmd := d.Cmdable.EvalSha(ctx, sha, keys, args...)
	if call.IsNoScript(cmd.Err()) {
		d.scripts-- // it is sent again in full
	}
	if reply, err := cmd.Slice(); err == nil && d.gap != nil {
		if request := reply[0].([]any)[2].([]any); request[0] == "GAP" {
			d.gap()
		}
	}
	return cmd
}

func (d *dying) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	d.scripts++
	return d.Cmdable.Eval(ctx, script, keys, args...)
}

func (d *dying) of(w *stagetest.World, cfg groups.Config) *groups.Store {
	d.Cmdable = w.Conn.Cmd
	return groups.New(cfg, w.Conn, w.Space, w.Tel, reducer.NewRegistry(), d)
}

// TestSubmitOutlivesALostScript: a failover loses the writes of one of a submission's three scripts.
// The submission notices that and stores all jobs. To notice the loss of the last script, it must
// wait for a replica.
func TestSubmitOutlivesALostScript(t *testing.T) {
	t.Parallel()
	const n, scripts = 2*ledger.MaxAppend + 50, 3 // the first of them creates the group
	replicas, _ := replicated(t, 1)
	durable := groups.Config{WaitReplicas: 1, WaitTimeout: stagetest.Patience}
	for _, tt := range []struct {
		w     *stagetest.World
		cfg   groups.Config
		known int
	}{{stagetest.Shared(t), groups.Config{}, scripts - 1}, {replicas, durable, scripts}} {
		for i := range tt.known {
			g := large(n)
			g.ID = fmt.Sprint("g", i)
			d := &dying{unheard: func(script int) bool { return script == i }}
			_, err := d.of(tt.w, tt.cfg).Submit(stagetest.Trusted(t), g, now)
			require.NoError(t, err)
			holds(tt.w, g.ID, n)
			require.True(t, tt.w.Group(g.ID).Sealed)
		}
	}
}

// TestAppendOutlivesALostPiece: a failover loses one of an append's three pieces. The append stores
// it again, and has all its jobs. A repeated append stores no job twice.
func TestAppendOutlivesALostPiece(t *testing.T) {
	t.Parallel()
	const n, pieces = 2*ledger.MaxAppend + 50, 3
	w, _ := replicated(t, 1)
	cfg := groups.Config{WaitReplicas: 1, WaitTimeout: stagetest.Patience}
	for i := range pieces {
		g := fmt.Sprint("g", i)
		_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: g, Type: "T"}, now)
		require.NoError(t, err)
		for j, add := range []func(*groups.Store) error{
			func(s *groups.Store) error { return s.Append(stagetest.Trusted(t), g, stagetest.Numbered(n), "r", now) },
			func(s *groups.Store) error {
				return appendEntry(stagetest.Trusted(t), s, g, stagetest.Numbered(n), "1-1", fmt.Sprint("m", i), now)
			},
			func(s *groups.Store) error {
				return appendEntry(stagetest.Trusted(t), s, g, stagetest.Numbered(n), fmt.Sprint("2-", i), "", now)
			},
		} {
			d := &dying{unheard: func(script int) bool { return script == i }}
			require.NoError(t, add(d.of(w, cfg)))
			require.EqualValues(t, (j+1)*n, w.Counts(g).Accepted)
			require.NoError(t, add(w.Store))
			require.EqualValues(t, (j+1)*n, w.Counts(g).Accepted, "no job is stored twice")
		}
	}
}

// TestSubmitGivesUpOnLostPieces: when pieces are lost again and again, the submission is repeated
// until retryTime is over or, as here, its context ends; then the caller gets an error. The
// repeated request stores the missing pieces.
func TestSubmitGivesUpOnLostPieces(t *testing.T) {
	t.Parallel()
	const n = 2*ledger.MaxAppend + 50
	w := stagetest.Shared(t)
	ctx, cancel := context.WithCancel(stagetest.Trusted(t))
	defer cancel()
	gaps := 0
	d := &dying{
		unheard: func(script int) bool { return script%3 == 1 }, // the second piece, each time
		gap: func() {
			if gaps++; gaps == 3 {
				cancel()
			}
		},
	}
	_, err := d.of(w, groups.Config{}).Submit(ctx, large(n), now)
	require.ErrorIs(t, err, api.ErrUnavailable)
	require.Equal(t, 3, gaps)
	require.False(t, w.Group("g").Sealed)
	_, err = w.Store.Submit(stagetest.Trusted(t), large(n), now)
	require.NoError(t, err)
	holds(w, "g", n)
}

// TestWaitsAreShared: the replica answers only after 50 concurrent submissions were written. All of
// them succeed, with fewer than 50 commands WAIT.
func TestWaitsAreShared(t *testing.T) {
	t.Parallel()
	ctx := auth.Trust(context.Background())
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

// lossy is a hook of the Redis client that loses the first reply to each different command: Redis
// executes it, and the caller gets a network error. Commands are different if their names or first
// arguments are (a key or a script). A pipeline counts as its first command and its length.
type lossy struct {
	redistest.NoHook
	mu   sync.Mutex
	seen map[string]bool
}

func (l *lossy) loses(cmds ...redis.Cmder) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	args := cmds[0].Args()
	name := fmt.Sprint(len(cmds), args[:min(2, len(args))])
	fresh := !l.seen[name]
	l.seen[name] = true
	return fresh
}

func (l *lossy) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if l.loses(cmd) {
			err = io.ErrUnexpectedEOF
			cmd.SetErr(err)
		}
		return err
	}
}

func (l *lossy) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if l.loses(cmds...) {
			err = io.ErrUnexpectedEOF
			for _, cmd := range cmds {
				cmd.SetErr(err)
			}
		}
		return err
	}
}

// TestALostReplyFailsNoRequest: submit, append (of a request or an entry), seal, pause and cancel
// succeed although the first reply to each of their commands is lost.
func TestALostReplyFailsNoRequest(t *testing.T) {
	t.Parallel()
	ctx := stagetest.Trusted(t)
	for name, request := range map[string]func(*groups.Store) error{
		"submit": func(s *groups.Store) error {
			_, err := s.Submit(ctx, &messages.SubmitGroup{ID: "new", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)}, now)
			return err
		},
		"append": func(s *groups.Store) error { return s.Append(ctx, "g", stagetest.Numbered(1), "r", now) },
		"entry":  func(s *groups.Store) error { return appendEntry(ctx, s, "g", stagetest.Numbered(1), "1-1", "", now) },
		"seal":   func(s *groups.Store) error { _, err := s.Seal(ctx, "g", nil); return err },
		"pause":  func(s *groups.Store) error { _, err := s.Pause(ctx, "g"); return err },
		"cancel": func(s *groups.Store) error { _, err := s.Cancel(ctx, "g"); return err },
	} {
		t.Run(name, func(t *testing.T) {
			url, prefix := redistest.Shared(t)
			w := stagetest.New(t, url, prefix, 1)
			_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)}, now)
			require.NoError(t, err)
			w.Conn.Cmd.AddHook(&lossy{seen: map[string]bool{}})
			require.NoError(t, request(w.NewStore(groups.Config{MaxBacklog: 100, MaxMemoryRatio: 0.9})))
		})
	}
}

// vanishing is a hook of the Redis client that deletes a key just before its first GET, as if the
// key had expired then.
type vanishing struct {
	redistest.NoHook
	client redis.Cmdable
	key    string
	gone   bool
}

// makeVanish adds the hook to the client of w.
func makeVanish(w *stagetest.World, key string) *vanishing {
	v := &vanishing{client: w.Connect().Cmd, key: key}
	w.Conn.Cmd.AddHook(v)
	return v
}

func (v *vanishing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !v.gone && cmd.Name() == "get" && cmd.Args()[1] == v.key {
			v.gone = true
			v.client.Del(ctx, v.key)
		}
		return next(ctx, cmd)
	}
}

func (v *vanishing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if v.gone || cmds[0].Args()[1] != v.key {
			return next(ctx, cmds)
		}
		v.gone = true
		if err := next(ctx, cmds[:1]); err != nil {
			return err
		}
		v.client.Del(ctx, v.key)
		return next(ctx, cmds[1:])
	}
}

// TestOwnerKeyThatVanishes: the owner key of an earlier group with the same id is deleted between the
// two commands that register it. The submission is to be repeated, and is stored then.
func TestOwnerKeyThatVanishes(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	ctx, registry := stagetest.Trusted(t), w.Space.OfGroup("g")
	owner, tenant := registry.Owner("g"), 0
	for w.Space.OfTenant(fmt.Sprint(tenant)).Index() == registry.Index() {
		tenant++
	}
	require.NoError(t, w.Conn.Cmd.Set(ctx, owner, "globex", 0).Err())
	v := makeVanish(w, owner)
	submit := func() error {
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "g", Tenant: fmt.Sprint(tenant), Type: "T"}, groups.Origin{})
		return err
	}
	require.ErrorIs(t, submit(), api.ErrUnavailable)
	require.True(t, v.gone)
	require.NoError(t, submit())
	require.Equal(t, fmt.Sprint(tenant), w.Conn.Cmd.Get(ctx, owner).Val())
}

// TestIdempotencyRecordThatVanishes: a submission is stored although the record of its idempotency
// key expires between the two commands that reserve the key.
func TestIdempotencyRecordThatVanishes(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := stagetest.Trusted(w.T)
		submit := func(id string) string {
			a, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T"},
				groups.Origin{IdempotencyKey: "k", GeneratedID: true, At: time.Now()})
			require.NoError(w.T, err)
			return a.ID
		}
		require.Equal(w.T, "first", submit("first"))
		v := makeVanish(w, w.Conn.Cmd.Keys(ctx, w.Space.Idempotency("*")).Val()[0])
		require.Equal(w.T, "second", submit("second"))
		require.True(w.T, v.gone)
		require.Equal(w.T, "second", submit("third"))
	})
}
