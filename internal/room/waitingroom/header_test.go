package waitingroom

import (
	"context"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/luaheader"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/lua"
)

var allScripts = []*call.Script{
	declareScript, enterScript, disconnectScript, leaveScript, promoteScript, claimScript, renewScript,
	completeScript, expireScript, sweepScript, forgetScript, snapshotScript, auditScript,
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../lua/room/*.lua")
	require.NoError(t, err)
	var names []string
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".lua"))
	}
	for _, script := range allScripts {
		require.Contains(t, names, script.Name())
		t.Run(script.Name(), func(t *testing.T) {
			luaheader.Check(t, script.Name(), lua.Source("room/"+script.Name()), []string{"base", "absent"})
		})
	}
	require.Len(t, allScripts, len(names))
}

// evals is a hook of the Redis client that records the ARGV of each EVALSHA outside of pipelines,
// by the hash of the script.
type evals struct {
	mu sync.Mutex
	of map[string][][]any
}

func (e *evals) DialHook(next redis.DialHook) redis.DialHook { return next }
func (e *evals) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (e *evals) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if args := cmd.Args(); cmd.Name() == "evalsha" {
			e.mu.Lock()
			hash, _ := args[1].(string)
			e.of[hash] = append(e.of[hash], args[5:])
			e.mu.Unlock()
		}
		return next(ctx, cmd)
	}
}

// TestContractsKeepToTheHeaders: the methods of Rooms send their scripts the arguments that the
// headers of the Lua files list.
func TestContractsKeepToTheHeaders(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url, PoolMaxActive: 4})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	seen := &evals{of: map[string][][]any{}}
	conn.Cmd.AddHook(seen)
	var observed []string
	r := New(conn, space, func(script string, _ time.Duration, err error) {
		require.NoError(t, err)
		observed = append(observed, script)
	})
	ctx, p, stock := t.Context(), space.Partition(0), int64(7)
	_, err = r.Declare(ctx, "e", Settings{Stock: &stock, Rate: 1, Burst: 2, Capacity: 3}, DeclareOptions{})
	require.NoError(t, err)
	_, err = r.Change(ctx, "e", Changes{Capacity: &stock, Left: &stock, SeatsKnown: true, Mode: "open"})
	require.NoError(t, err)
	a := Visitor{User: "a", Conn: "00000001.1"}
	_, err = r.Enter(ctx, "e", EnterNew, time.Second, a, Visitor{User: "b"})
	require.NoError(t, err)
	_, err = r.Disconnect(ctx, "e", a)
	require.NoError(t, err)
	_, err = r.Promote(ctx, "e")
	require.NoError(t, err)
	_, err = r.Claim(ctx, "e", a)
	require.NoError(t, err)
	_, err = r.Renew(ctx, "e", "a", "1")
	require.NoError(t, err)
	_, err = r.Complete(ctx, "e", "a", "1", true)
	require.NoError(t, err)
	_, err = r.Expire(ctx, p, "e")
	require.NoError(t, err)
	_, _, _, err = r.Sweep(ctx, "e", 0, []string{"00000001"})
	require.NoError(t, err)
	_, err = r.Snapshot(ctx, p, "e", "f")
	require.NoError(t, err)
	_, err = r.Audit(ctx, "e", nil)
	require.NoError(t, err)
	_, _, err = r.Leave(ctx, "e", "a")
	require.NoError(t, err)
	_, _, err = r.Forget(ctx, "e")
	require.NoError(t, err)

	byHash := map[string]string{}
	for _, s := range allScripts {
		byHash[s.SHA()] = s.Name()
		require.Contains(t, observed, s.Name())
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	for hash, calls := range seen.of {
		name := byHash[hash]
		require.NotEmpty(t, name)
		header, _ := luaheader.Split(lua.Source("room/" + name))
		signature := luaheader.Of(t, header)
		for _, args := range calls {
			signature.Takes(t, name, args)
		}
	}
	require.Len(t, seen.of, len(allScripts))
}

// TestKeysOfScripts: the names of the keys that the scripts and parts/room build are those of
// package keyspace, all of them and no others.
func TestKeysOfScripts(t *testing.T) {
	t.Parallel()
	space, err := keyspace.New("P:", 1)
	require.NoError(t, err)
	p := space.Partition(0)
	named := regexp.MustCompile(`(?:B|ROOM|room) \.\. '([^']+)'`)
	var found []string
	for _, file := range append([]string{"parts/room"}, roomFiles()...) {
		_, code := luaheader.Split(lua.Source(file))
		for _, key := range named.FindAllStringSubmatch(code, -1) {
			found = append(found, key[1])
		}
	}
	slices.Sort(found)
	room := p.Room("")
	want := []string{strings.TrimPrefix(room, p.Base())}
	for _, key := range []string{p.Rooms(), p.RoomCleanup(), p.Entry(), p.Moves(), p.Wake("promoter")} {
		want = append(want, strings.TrimPrefix(key, p.Base()))
	}
	for _, key := range []string{p.RoomWaiting(""), p.RoomAway(""), p.RoomSlots(""), p.RoomUsers("")} {
		want = append(want, strings.TrimPrefix(key, room))
	}
	require.ElementsMatch(t, want, slices.Compact(found))
}

func roomFiles() []string {
	var files []string
	for _, s := range allScripts {
		files = append(files, "room/"+s.Name())
	}
	return files
}
