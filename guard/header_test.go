package guard

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/luaheader"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/lua"
)

var allScripts = map[string]*call.Script{
	"acquire": acquireScript, "control": controlScript, "declare": declareScript, "inspect": inspectScript,
	"release": releaseScript, "renew": renewScript, "take": takeScript, "wait": waitScript,
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	for name, script := range allScripts {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, name, script.Name())
			file := "guard/" + name
			luaheader.Check(t, name, lua.Source(file), []string{"base", "absent"}, []string{"limiter"})
		})
	}
}

// sent is a hook of the Redis client that records the keys and arguments of each script call, by
// the script's hash.
type sent struct {
	mu sync.Mutex
	of map[string][][]any
}

func (s *sent) note(cmds ...redis.Cmder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cmd := range cmds {
		if args := cmd.Args(); cmd.Name() == "evalsha" {
			hash := fmt.Sprint(args[1])
			s.of[hash] = append(s.of[hash], args[2:])
		}
	}
}

func (s *sent) DialHook(next redis.DialHook) redis.DialHook { return next }
func (s *sent) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		s.note(cmd)
		return next(ctx, cmd)
	}
}
func (s *sent) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		s.note(cmds...)
		return next(ctx, cmds)
	}
}

// TestContractsKeepToTheHeaders: the Go code calls each script of guards, with as many keys as the
// header of its Lua file lists, and with arguments that fit the header.
func TestContractsKeepToTheHeaders(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	rdb, c := newTestClient(t, url, prefix)
	seen := &sent{of: map[string][][]any{}}
	rdb.AddHook(seen)
	ctx := t.Context()
	spec := Spec{
		Members: []Member{
			{ID: "a", Rate: &Rate{Permits: 3, Window: time.Second, Kind: SlidingWindow}},
			{ID: "b", Breaker: &BreakerPolicy{Failures: 1, OpenFor: time.Second, Successes: 1}, Concurrency: 2},
		},
		Rate: Bucket(100, time.Second), Breaker: BreakerPolicy{Failures: 3, OpenFor: time.Minute, Successes: 2},
		Lease: 300 * time.Millisecond, Concurrency: 1,
	}
	p, err := c.Pool(ctx, "p", spec)
	require.NoError(t, err)
	for _, o := range []Outcome{Success, Failure, Neutral, Unused, Throttled(time.Millisecond)} {
		l, err := p.TryAcquire(ctx, On("a"))
		if err == nil {
			require.NoError(t, l.Release(ctx, o))
		}
	}
	l, err := p.Acquire(ctx)
	require.NoError(t, err)
	_, err = c.Limiter("l", PerWindow(5, time.Second)).Take(ctx, "k", 2)
	require.NoError(t, err)
	_, err = c.Limiter("m", Bucket(5, time.Second)).Take(ctx, "k", 2)
	require.NoError(t, err)
	k := c.Lock("k", TTL(300*time.Millisecond))
	held, err := k.TryLock(ctx)
	require.NoError(t, err)
	waited := make(chan error, 1)
	go func() {
		next, err := k.Lock(ctx)
		if err == nil {
			err = next.Release(ctx, Neutral)
		}
		waited <- err
	}()
	hashes := func() []string {
		seen.mu.Lock()
		defer seen.mu.Unlock()
		return slices.Collect(maps.Keys(seen.of))
	}
	require.Eventually(t, func() bool { return len(hashes()) >= 6 }, patience, time.Millisecond) // renew, wait
	require.NoError(t, held.Release(ctx, Neutral))
	require.NoError(t, <-waited)
	require.NoError(t, l.Release(ctx, Success))
	for _, do := range Actions {
		require.NoError(t, c.Control(ctx, "pool/p", "b", do))
	}
	_, err = p.Inspect(ctx)
	require.NoError(t, err)

	seen.mu.Lock()
	defer seen.mu.Unlock()
	for name, script := range allScripts {
		file := "guard/" + name
		header, _ := luaheader.Split(lua.Source(file))
		signature := luaheader.Of(t, header)
		hash := script.SHA()
		require.NotEmpty(t, seen.of[hash], "nobody has called %s", name)
		for _, args := range seen.of[hash] {
			n := args[0].(int)
			require.Len(t, signature.Keys, n, name)
			signature.Takes(t, name, args[1+n:])
		}
		delete(seen.of, hash)
	}
	require.Empty(t, seen.of)
}

// TestKeysOfScripts: the names of keys in the scripts of guards are the 11 that the test lists.
func TestKeysOfScripts(t *testing.T) {
	t.Parallel()
	named := regexp.MustCompile(`B \.\. '([^']+)'`)
	found := map[string]bool{}
	for _, file := range append(slices.Collect(maps.Keys(allScripts)),
		"../parts/guard", "../parts/quick", "../parts/quick_permit", "acquire_quick", "release_quick",
		"acquire_limited", "release_limited") {
		path := strings.TrimPrefix("guard/"+file, "guard/../")
		_, code := luaheader.Split(lua.Source(path))
		for _, key := range named.FindAllStringSubmatch(code, -1) {
			found[key[1]] = true
		}
	}
	require.ElementsMatch(t, []string{
		"guard", "m:", "m:1", "free", "cooling", "leases", "lease", "queue", "waiters", "clients", "members",
	}, slices.Collect(maps.Keys(found)))
}
