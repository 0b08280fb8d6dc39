package guard

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// stage is an empty server on which scenes are played.
type stage struct {
	*testing.T
	s    *rapidtest.Scripts
	base string
	now  int64
}

// play calls a script 1 ms later than the last one, with the keys of the stage's guard or limiter.
func (st *stage) play(script string, args ...any) (any, error) {
	st.now += 1000
	st.s.SetTime(st.s, st.now)
	return st.eval(script, args)
}

func (st *stage) eval(script string, args []any) (any, error) {
	keys := guardKeys(st.base)
	if script == "take" {
		keys = []string{limiterKey}
	}
	return st.s.Call(st.s, script, keys, args...).Result()
}

func (st *stage) must(script string, args ...any) []any {
	st.Helper()
	reply, err := st.play(script, args...)
	require.NoError(st, err)
	return reply.([]any)
}

// fence returns the fence of a call's lease.
func (st *stage) fence(id string) string {
	text := st.s.HGet(st.Context(), st.base+"lease", id).Val()
	fence, _, _ := strings.Cut(text, "|")
	return fence
}

func (st *stage) dump() map[string]string {
	keys, err := st.s.All()
	require.NoError(st, err)
	all := map[string]string{}
	for name, k := range keys {
		content := k.Content
		if k.Kind == "hash" { // HGETALL of a large hash has no order
			content = nil
			for field, value := range k.Hash() {
				if field != "clk" && field != "offset" {
					content = append(content, field+"="+value)
				}
			}
			slices.Sort(content)
		}
		all[name] = fmt.Sprint(k.Kind, " ", content)
	}
	return all
}

const (
	poolSpec = "sliding|3|1000|0|2|500|2|1|3000|4000|10|0"
	lockSpec = "none|0|0|0|0|0|0|1|3000|4000|10|60000"
)

// A scene is one call of a script, in a state that other calls have prepared.
type scene struct {
	name    string
	script  string
	refused bool // when Redis's memory is full
	prepare func(st *stage) []any
	reply   string // a part of the reply; "" = any
	again   string // a part of the reply to the same call
}

// pool is the preparation of a scene: it declares a pool of three members, lends them, and puts
// three calls into the queue.
func (st *stage) pool() {
	st.base = "t:guard:{pool/p}:"
	st.must("declare", 0, poolSpec, 1, 3, "a", "", "b", "||||1|500|1|", "c", "token|2|1000|2||||")
	for _, id := range []string{"x-1", "x-2", "y-1"} {
		require.Equal(st, "GRANTED", st.must("acquire", id, id[:1], "", "", 0, 0, 10, "")[0])
	}
	for _, id := range []string{"x-3", "y-2", "z-1"} {
		require.Equal(st, "QUEUED", st.must("acquire", id, id[:1], "", "", 0, 4000, 10, "")[0])
	}
}

// late does what the method pool does, opens the breaker of member b, and moves the time on by 3.1
// s, so that leases expire and the next script call has much maintenance to do.
func (st *stage) late() {
	st.pool()
	st.must("release", 1, "x-2", st.fence("x-2"), "f", 0) // opens b
	st.must("wait", "y", "y-1")
	st.now += 3_100_000
}

var scenes = []scene{
	{"declare a pool", "declare", true, func(st *stage) []any {
		st.base = "t:guard:{pool/p}:"
		return []any{0, poolSpec, 1, 2, "a", "", "b", "|||||||2"}
	}, "CHANGED", "SAME"},
	{"declare again", "declare", true, func(st *stage) []any {
		st.late()
		return []any{0, poolSpec + "0", 1, 2, "b", "", "d", "none|0|0|0||||"}
	}, "CHANGED", "SAME"},
	{"acquire a free member", "acquire", true, func(st *stage) []any {
		st.base = "t:guard:{pool/p}:"
		st.must("declare", 0, poolSpec, 1, 2, "a", "", "b", "")
		return []any{"x-1", "x", "", "", 0, 4000, 10, ""}
	}, "GRANTED", "GRANTED"},
	{"acquire of a new lock", "acquire", true, func(st *stage) []any {
		st.base = "t:guard:{lock/p}:"
		return []any{"x-1", "x", "", lockSpec, 0, 0, 10, ""}
	}, "GRANTED", "GRANTED"},
	{"acquire, queued", "acquire", true, func(st *stage) []any {
		st.pool()
		return []any{"z-2", "z", "", "", 0, 4000, 10, ""}
	}, "QUEUED 4", "QUEUED 4"},
	{"acquire, denied", "acquire", true, func(st *stage) []any {
		st.pool()
		return []any{"z-2", "z", "", "", 0, 0, 10, ""}
	}, "queued", "queued"},
	{"acquire after a long time", "acquire", true, func(st *stage) []any {
		st.late()
		return []any{"z-2", "z", "", "", 0, 4000, 10, ""}
	}, "QUEUED", "QUEUED"},
	{"wait", "wait", false, func(st *stage) []any {
		st.late()
		return []any{"y", "y-2"}
	}, "GRANTED", "GRANTED"},
	{"wait in the queue", "wait", false, func(st *stage) []any {
		st.pool()
		return []any{"z", "z-1", "z-7"}
	}, "[QUEUED 3] [GONE]", "[QUEUED 3] [GONE]"},
	{"release", "release", false, func(st *stage) []any {
		st.pool()
		return []any{2, "x-1", st.fence("x-1"), "s", 0, "y-1", st.fence("y-1"), "f", 0}
	}, "[OK C 0] [OK C 0]", "[GONE] [GONE]"},
	{"release a failure after a long time", "release", false, func(st *stage) []any {
		st.late()
		fence := st.fence("x-3")
		return []any{1, "x-3", fence, "f", 0}
	}, "", "GONE"},
	{"cancel", "release", false, func(st *stage) []any {
		st.pool()
		return []any{2, "y-2", "", "u", 0, "x-1", "", "u", 0}
	}, "[LEFT] [GIVEN]", "[GONE] [GONE]"},
	{"renew", "renew", false, func(st *stage) []any {
		st.pool()
		return []any{0, "x-1", st.fence("x-1"), "x-2", "1"}
	}, "OK LOST", "OK LOST"},
	{"renew after a long time", "renew", false, func(st *stage) []any {
		st.late()
		return []any{0, "x-1", st.fence("x-1")}
	}, "LOST", "LOST"},
	{"disable", "control", false, func(st *stage) []any {
		st.late()
		return []any{"c", "disable", 0}
	}, "OK", "OK"},
	{"open", "control", false, func(st *stage) []any {
		st.pool()
		return []any{"a", "open", 0}
	}, "OK", ""},
	{"take back", "control", false, func(st *stage) []any {
		st.pool()
		return []any{"a", "take-back", 0}
	}, "OK", "OK"},
	{"take, sliding", "take", true, func(*stage) []any { return []any{1, "sliding", 2, 1000, 0} }, "[1 1 0", "[1 0 0"},
	{"take, token", "take", true, func(*stage) []any { return []any{1, "token", 2, 1000, 2} }, "[1 1 0", "[1 0 0"},
}

// TestScenes plays each scene on an empty Redis several times: it checks the reply, the same call
// again, the call with a wrong Redis type under each key that it changes, and the call with full
// memory.
func TestScenes(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	s := rapidtest.NewScripts(t, &redis.Options{Addr: server.Addr()}, nil, allScripts...)
	for _, scene := range scenes {
		t.Run(scene.name, func(t *testing.T) {
			fresh := func() (*stage, []any) {
				require.NoError(t, s.FlushDB(t.Context()).Err())
				st := &stage{T: t, s: s, now: 1_700_000_000_000_000}
				return st, scene.prepare(st)
			}
			st, args := fresh()
			before := st.dump()
			reply, err := st.play(scene.script, args...)
			require.NoError(t, err)
			require.Contains(t, fmt.Sprint(reply), scene.reply)
			after := st.dump()
			playTwice(st, scene, reply, args, after)
			for _, key := range slices.Sorted(maps.Keys(after)) {
				if before[key] != after[key] {
					playSpoiled(fresh, scene, key, after[key])
				}
			}
			st, args = fresh()
			playWithoutMemory(st, scene, args, after)
		})
	}
}

// playTwice repeats the script call of a scene: the reply contains sc.again, and the stored leases
// with their fences stay as they were. The latter is not checked for take, take back, open and
// queued calls.
func playTwice(st *stage, sc scene, first any, args []any, after map[string]string) {
	again, err := st.play(sc.script, args...)
	require.NoError(st, err)
	require.Contains(st, fmt.Sprint(again), sc.again)
	if sc.script == "take" || sc.name == "take back" || sc.name == "open" || sc.again == "queued" {
		return
	}
	lease := after[st.base+"lease"]
	require.Equal(st, lease, st.dump()[st.base+"lease"], "the same leases, with the same fences")
	if sc.again == "GRANTED" && sc.script == "acquire" {
		require.Equal(st, first.([]any)[:6], again.([]any)[:6])
	}
}

// playSpoiled plays a scene in which one key has a wrong Redis type: the script fails with
// WRONGTYPE. Unless that is the key of a member, all keys stay as they were, but for the guard's
// clock.
func playSpoiled(fresh func() (*stage, []any), sc scene, key, content string) {
	st, args := fresh()
	ctx := st.Context()
	require.NoError(st, st.s.Del(ctx, key).Err())
	require.NoError(st, st.s.RPush(ctx, key, "spoiled").Err())
	spoiled := st.dump()
	_, err := st.play(sc.script, args...)
	require.ErrorContains(st, err, "WRONGTYPE", "%s, which was %s", key, content)
	if strings.HasPrefix(key, st.base+"m:") {
		return // steps for other members may have come first; each is complete
	}
	require.Equal(st, spoiled, st.dump(), "%s is of the wrong type", key)
}

// playWithoutMemory plays a scene while Redis's memory is full: the script is refused, or it does
// the same as with free memory, as the scene says.
func playWithoutMemory(st *stage, sc scene, args []any, after map[string]string) {
	before := st.dump()
	st.now += 1000
	st.s.SetTime(st.s, st.now)
	require.NoError(st, st.s.ConfigSet(st.Context(), "maxmemory", "1").Err())
	_, err := st.eval(sc.script, args)
	require.NoError(st, st.s.ConfigSet(st.Context(), "maxmemory", "0").Err())
	if sc.refused {
		require.True(st, call.IsOOM(err), "%v", err)
		require.Equal(st, before, st.dump())
		return
	}
	require.NoError(st, err)
	require.Equal(st, after, st.dump())
}

// TestReasonOfADenial: if a member has no permit and its breaker is open, the denial names the
// reason that lasts longer.
func TestReasonOfADenial(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	s := rapidtest.NewScripts(t, &redis.Options{Addr: server.Addr()}, nil, allScripts...)
	for _, c := range []struct {
		openFor, later int64  // ms
		policy         string // from the first denied call on
		after          int64
		reason         string
	}{
		{2000, 0, "1|2000|1", 2000 - 2, "circuit_open"},
		{2000, 1500, "1|2000|1", 500 - 2, "circuit_open"},
		{2000, 0, "0|0|0", 2000 - 2, "circuit_open"}, // without a policy it stays open for its time
		{500, 0, "1|500|1", 1000 - 2, "rate_limited"},
		{500, 600, "1|500|1", 400 - 2, "rate_limited"}, // it may be half-open
		{500, 600, "0|0|0", 400 - 2, "rate_limited"},   // it is closed
	} {
		t.Run(fmt.Sprintf("open for %d ms, after %d ms, policy %s", c.openFor, c.later, c.policy), func(t *testing.T) {
			require.NoError(t, s.FlushDB(t.Context()).Err())
			st := &stage{T: t, s: s, base: "t:guard:{lock/p}:", now: 1_700_000_000_000_000}
			acquire := func(id, policy string) []any {
				return st.must("acquire", id, "x", "", "sliding|1|1000|0|"+policy+"|1|3000|4000|10|60000", 0, 0, 10, "")
			}
			require.Equal(t, "GRANTED", acquire("x-1", fmt.Sprintf("1|%d|1", c.openFor))[0])
			st.must("release", 1, "x-1", st.fence("x-1"), "f", 0)
			require.Equal(t, "DENIED", acquire("x-2", c.policy)[0])
			st.now += c.later * 1000
			require.Equal(t, []any{"DENIED", c.after, c.reason}, acquire("x-3", c.policy)[:3])
			require.Equal(t, "O", s.HGet(t.Context(), st.base+"m:1", "b").Val())
		})
	}
}
