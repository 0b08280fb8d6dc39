package ledger_test

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"maps"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/luaheader"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/lua"
)

// ownScripts returns the scripts of the packages ledger, presence and acl. The packages guard,
// waitingroom, apikey and activity test their own scripts.
func ownScripts(t *testing.T) []sent {
	t.Helper()
	return slices.DeleteFunc(sentScripts(t), func(s sent) bool {
		return slices.Contains([]string{"activity", "auth", "guard", "room"}, path.Dir(s.name()))
	})
}

// scripts returns the sources of ownScripts by file name, without the parts.
func scripts(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, s := range ownScripts(t) {
		all[path.Base(s.name())] = lua.Source(s.name())
	}
	require.Greater(t, len(all), 15)
	return all
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	for name, source := range scripts(t) {
		t.Run(name, func(t *testing.T) {
			luaheader.Check(t, name, source, []string{"base", "absent"}, []string{"stream"}, []string{"hash"}, []string{"history"}, nil)
		})
	}
}

// calls is a hook of the Redis client that records the number of keys and the arguments of each
// EVALSHA outside of pipelines, by the script's SHA-1.
type calls struct{ of map[string][]given }

type given struct {
	keys int
	args []any
}

func (c *calls) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c *calls) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (c *calls) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			args := cmd.Args() // evalsha, hash, number of keys, keys, arguments
			hash, keys := args[1].(string), args[2].(int)
			c.of[hash] = append(c.of[hash], given{keys: keys, args: args[3+keys:]})
		}
		return next(ctx, cmd)
	}
}

// TestContractsKeepToTheHeaders: the Go functions send the number of keys and arguments that the
// scripts' headers list. A scene or this test calls the Go function of every script.
func TestContractsKeepToTheHeaders(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	c := client(t, url)
	seen := &calls{of: map[string][]given{}}
	c.AddHook(seen)
	for i, s := range slices.Concat(scenes, readOnlyScenes) {
		require.NoError(t, s.prepare(newWorld(t, c, prefix+fmtInt(int64(i))+":"))(), s.name)
	}
	_, err := ledger.DropConsumer(t.Context(), c, prefix+"nothing", "g", "c", 0)
	require.Error(t, err)
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	conn := &redisx.Conn{Cmd: c}
	require.NoError(t, presence.PublishStage(t.Context(), conn, space, api.StageStatus{ID: "p"}))
	_, err = presence.Stages(t.Context(), conn, space)
	require.NoError(t, err)
	_, err = ledger.RecordSample(t.Context(), c, space, ledger.Sample{})
	require.NoError(t, err)
	require.NoError(t, acl.Check(t.Context(), conn, acl.User{Name: "x", Commands: []string{"get"}, Keys: []string{"{*}:*"}}))

	for _, s := range ownScripts(t) {
		sum := sha1.Sum([]byte(s.source()))
		hash := hex.EncodeToString(sum[:])
		require.NotEmpty(t, seen.of[hash], "nobody has called %s", s.name())
		header, _ := luaheader.Split(lua.Source(s.name()))
		sig := luaheader.Of(t, header)
		for _, call := range seen.of[hash] {
			require.Len(t, sig.Keys, call.keys, s.name())
			sig.Takes(t, s.name(), call.args)
		}
		delete(seen.of, hash)
	}
	require.Empty(t, seen.of)
}

// TestKeysAgreeWithKeyspace: the keys that scripts build by concatenation are the keys that package
// keyspace names for jobs, no more and, but for those in outside, no less.
func TestKeysAgreeWithKeyspace(t *testing.T) {
	t.Parallel()
	space, err := keyspace.New("", 1)
	require.NoError(t, err)
	named := patternsOf(space.Partition(0))
	outside := map[string]string{
		"owner:*":   "it lies in another partition, the one of the group's id",
		"rebalance": "lead is told whether it is this one or watch",
		"waited":    "it is written for WAIT alone",
		"top":       "the watcher replaces it as a whole",
		"audit":     "the watcher replaces it as a whole",
	}
	stems := map[string]string{"over:*": "admit puts the lane behind it"}

	all := map[string]string{}
	for _, s := range ownScripts(t) {
		for _, file := range s.files {
			all[file] = lua.Source(file)
		}
	}
	used := map[string]bool{}
	for name, source := range all {
		_, code := luaheader.Split(source)
		for _, key := range keysIn(code) {
			if stems[key] != "" {
				key += ":*"
			}
			i := slices.IndexFunc(named, func(pattern string) bool { return matches(pattern, key) })
			require.GreaterOrEqual(t, i, 0, "%s builds %q, which keyspace does not know", name, key)
			used[named[i]] = true
		}
	}
	for pattern := range outside {
		used[pattern] = true
	}
	require.ElementsMatch(t, named, slices.Collect(maps.Keys(used)))

	// Each consumer group that a script names in XACK, XPENDING or XCLAIM is one of package
	// keyspace, or oom.
	for name, source := range all {
		_, code := luaheader.Split(source)
		for _, found := range regexp.MustCompile(`'(?:XACK|XPENDING|XCLAIM)', (?:stream|B [^,]*), '([a-z]+)'`).FindAllStringSubmatch(code, -1) {
			require.Contains(t, []string{keyspace.GroupWorkers, keyspace.GroupAggregator, "oom"}, found[1], name)
		}
	}
}

// patternsOf returns the patterns of all keys that keyspace.Partition names, except those of the
// waiting room, with * for each id. It calls the methods by reflection.
func patternsOf(p keyspace.Partition) []string {
	var all []string
	v, room := reflect.ValueOf(p), reflect.TypeFor[keyspace.RoomKeys]() // of package waitingroom
	for i := range v.NumMethod() {
		method := v.Method(i).Type()
		if method.NumOut() != 1 || method.Out(0).Kind() != reflect.String || v.Type().Method(i).Name == "Base" {
			continue
		}
		if _, is := room.MethodByName(v.Type().Method(i).Name); is {
			continue
		}
		args := make([]reflect.Value, method.NumIn())
		for j := range args {
			args[j] = reflect.ValueOf("*")
		}
		all = append(all, strings.TrimPrefix(v.Method(i).Call(args)[0].String(), p.Base()))
	}
	return all
}

// keysIn returns the keys that a script's source builds by concatenations that begin with B, the
// base: a literal stands for itself, anything else for *.
func keysIn(code string) []string {
	part := regexp.MustCompile(`^ \.\. (?:'([^']*)'|[a-z_]+(?:\.[a-z]+|\[\w+\]|\([^()]*\))*)`)
	var keys []string
	for _, at := range regexp.MustCompile(`\bB \.\. '`).FindAllStringIndex(code, -1) {
		key := ""
		for rest := code[at[0]+1:]; ; {
			found := part.FindStringSubmatch(rest)
			if found == nil {
				break
			}
			if strings.Contains(found[0], "'") {
				key += found[1]
			} else {
				key += "*"
			}
			rest = rest[len(found[0]):]
		}
		keys = append(keys, key)
	}
	return keys
}

// matches says whether a key matches a pattern, in which * stands for one id.
func matches(pattern, key string) bool {
	want, got := strings.Split(pattern, ":"), strings.Split(key, ":")
	return len(want) == len(got) && slices.EqualFunc(want, got, func(w, g string) bool { return w == "*" || w == g })
}
