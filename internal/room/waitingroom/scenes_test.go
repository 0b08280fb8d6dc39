package waitingroom

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// stage is a partition with an event e for a test: user x has a token, y is READY, z is waiting, q
// polls, w is away.
type stage struct {
	*testing.T
	s      *rapidtest.Scripts
	micros int64
}

// play runs a script. It returns the reply as a text.
func (st *stage) play(script string, args ...any) (string, error) {
	reply, _, err := st.s.Run(st.micros, script, modelKeys, args)
	return fmt.Sprint(reply), err
}

func (st *stage) must(script string, args ...any) string {
	st.Helper()
	reply, err := st.play(script, args...)
	require.NoError(st, err)
	return reply
}

// keys returns the keys with their contents as a text.
func (st *stage) keys() string {
	st.Helper()
	dump, err := st.s.All()
	require.NoError(st, err)
	return fmt.Sprint(dump)
}

func sceneSettings(more ...any) []any {
	return append([]any{
		"e", "put", 0, "capacity", 2, "max_waiting", 5, "token_ttl", 5000, "leeway", 1000, "max_session", 60_000,
		"ready", 3000, "grace", 2000, "on_close", "release", "no_show", "release", "retention", 0, "rate", 2, "burst", 3,
	}, more...)
}

func newStage(t *testing.T, s *rapidtest.Scripts) *stage {
	require.NoError(t, s.FlushDB(t.Context()).Err())
	st := &stage{T: t, s: s, micros: 1_700_000_000_000_000}
	st.must("declare_room", sceneSettings("stock", 5)...)
	st.must("expire_users", "e")
	st.must("enter", "e", "new", 1000, "x", "00000001.1", "y", "00000002.1", "z", "00000001.2", "q", "", "w", "00000002.2")
	st.must("claim", "e", "x", "")
	st.must("disconnect", "e", "w", "00000002.2")
	st.micros += 1_000_000
	return st
}

func (st *stage) fence(user string) string {
	st.Helper()
	text, err := st.s.HGet(st.Context(), modelBase+"room:e:users", user).Result()
	require.NoError(st, err)
	r, _ := parseRecord(text)
	return r.fence
}

// scene is a call of a script in a state.
type scene struct {
	name, script string
	refused      bool // when memory is full
	args         func(st *stage) []any
	reply        string // the beginning of the reply
}

func given(args ...any) func(*stage) []any { return func(*stage) []any { return args } }

// late returns a function that moves the clock ms forward and then returns these arguments of a
// script.
func late(ms int64, args ...any) func(*stage) []any {
	return func(st *stage) []any {
		st.micros += 1000 * ms
		return args
	}
}

var scenes = []scene{
	{"create", "declare_room", true, given("o", "put", 0, "capacity", 1, "retention", 0, "mode", "open"), "[CREATED"},
	{"change", "declare_room", true, given("e", "change", 0, "capacity", 5), "[CHANGED"},
	{"sell out", "declare_room", true, given("e", "change", 0, "left", 0), "[CHANGED"},
	{"a new user", "enter", true, given("e", "new", 0, "n", "00000001.9"), "[OK 1700000000000001 ENTERED 6"},
	{"a new user without a stream", "enter", true, given("e", "new", 0, "n", ""), "[OK 1700000000000001 ENTERED 6"},
	{"return", "enter", true, given("e", "new", 0, "w", "00000001.9"), "[OK 1700000000000001 BACK 5"},
	{"enter twice", "enter", true, given("e", "new", 0, "z", "00000001.2"), "[OK 1700000000000001 BACK 3"},
	{"poll", "enter", true, given("e", "known", 1000, "q", ""), "[OK 1700000000000001 BACK 4"},
	{"a poll of a stranger", "enter", true, given("e", "known", 1000, "n", ""), "[OK 1700000000000001 NONE 0"},
	{"again", "enter", true, given("e", "again", 0, "z", "00000001.2"), "[OK 1700000000000001 BACK 3"},
	{"a full queue", "enter", true, given("e", "new", 0, "n1", "", "n2", "", "n3", ""), "[OK 1700000000000001 ENTERED"},
	{"a token has expired", "enter", true, late(5000, "e", "new", 0, "x", "00000001.9"), "[OK 1700000000000001 ENTERED 6"},
	{"a token has expired, closed", "enter", true, func(st *stage) []any {
		st.must("declare_room", "e", "change", 0, "mode", "closed")
		return late(5000, "e", "new", 0, "x", "00000001.9")(st)
	}, "[OK 1700000000000001 CLOSED 0"},
	{"the clock has stepped back", "enter", true, late(-3_600_000, "e", "new", 0, "n", ""), "[OK 1700000000000001 ENTERED 6"},
	{"the stream of a waiting user ends", "disconnect", false, given("e", "z", "00000001.2"), "[AWAY]"},
	{"the streams of users inside end", "disconnect", false, given("e", "x", "00000001.1", "y", "00000002.1"), "[GONE NO_SHOW]"},
	{"leave", "leave", false, given("e", "z"), "[LEFT 00000001.2]"},
	{"leave inside", "leave", false, given("e", "x"), "[LEFT 00000001.1]"},
	{"promote", "promote_users", false, func(st *stage) []any {
		st.must("leave", "e", "x")
		return []any{"e", 200}
	}, "[1 "},
	{"promote after a step back", "promote_users", false, func(st *stage) []any {
		st.must("leave", "e", "x")
		return late(-3_600_000, "e", 200)(st)
	}, "[0 500 "}, // the bucket has to fill again
	{"promote nobody", "promote_users", false, given("o", 200), "[0 -1 1700000001000 ]"},
	{"claim", "claim", false, given("e", "y", "00000002.1", "x", "", "z", "", "x", "00000009.1"), "[CLAIMED"},
	{"renew", "renew_token", false, func(st *stage) []any { return []any{"e", "x", st.fence("x")} }, "[RENEWED"},
	{"complete", "complete", false, func(st *stage) []any { return []any{"e", "x", st.fence("x"), 1} }, "[DONE]"},
	{"the last seat", "complete", false, func(st *stage) []any {
		st.must("declare_room", "e", "change", 0, "left", 1)
		return []any{"e", "x", st.fence("x"), 1}
	}, "[DONE]"},
	{"expire", "expire_users", false, func(st *stage) []any {
		st.micros += 4_000_000
		st.must("expire_users", "")
		return late(4000, "e")(st)
	}, "[4 "},
	{"expire after a pause", "expire_users", false, late(60_000, "e"), "[1 "},
	{"expire after a step back", "expire_users", false, late(-3_600_000, "e"), "[0 "},
	{"note that expire has run", "expire_users", false, late(1000, ""), "[0 -1"},
	{"sweep", "sweep_room", false, late(15_000, "e", 0, "00000002"), "[0 1 0]"},
	{"forget", "forget", false, func(st *stage) []any {
		st.must("declare_room", "e", "change", 0, "mode", "closed")
		return []any{"e"}
	}, "[3 "},
	{"forget all", "forget", false, func(st *stage) []any {
		st.must("declare_room", "e", "change", 0, "mode", "closed")
		for _, user := range []string{"x", "y", "z", "q", "w"} {
			st.must("leave", "e", user)
		}
		return []any{"e"}
	}, "[0 -1]"},
	{"snapshot", "snapshot", false, given("e", "o"), "[1700000001000"},
	{"audit an event", "audit_room", false, given("e", "event", 0, 200), "[0 5 []]"},
	{"audit users", "audit_room", false, given("e", "users", 0, 200), "[0 5 ["},
}

// TestScenes runs each scene, a script call with an expected reply: first normally, then once with
// a wrong Redis type under each key, and once with Redis's memory full.
func TestScenes(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	s := rapidtest.NewScripts(t, &redis.Options{Addr: server.Addr()}, nil, allScripts...)
	for _, scene := range scenes {
		t.Run(scene.name, func(t *testing.T) {
			fresh := func() (*stage, []any) {
				st := newStage(t, s)
				return st, scene.args(st)
			}
			st, args := fresh()
			reply := st.must(scene.script, args...)
			require.Contains(t, reply, scene.reply)
			after := st.keys()
			room := fmt.Sprintf("room:%s", args[0])
			for _, key := range []string{
				room, room + ":waiting", room + ":away", room + ":slots", room + ":users", "rooms", "cleanup", "entry", "moves",
				"wake:promoter",
			} {
				st, args := fresh()
				playSpoiled(st, scene, args, modelBase+key)
			}
			st, args = fresh()
			playWithoutMemory(st, scene, args, reply, after)
		})
	}
}

// playSpoiled runs a scene while one key has a wrong Redis type. The script must fail before its
// first write, because Redis does not undo writes when a script fails. Only snapshot, which does
// not read all keys, may succeed.
func playSpoiled(st *stage, sc scene, args []any, key string) {
	ctx := st.Context()
	kind, err := st.s.Type(ctx, key).Result()
	require.NoError(st, err)
	require.NoError(st, st.s.Del(ctx, key).Err())
	spoil := []any{"set", key, "spoiled"}
	require.NoError(st, st.s.Do(ctx, spoil...).Err())
	before := st.keys()
	_, err = st.play(sc.script, args...)
	if err == nil { // the script does not need the key
		require.Equal(st, "snapshot", sc.script, "%s, which was of type %s", key, kind)
		return
	}
	require.ErrorContains(st, err, "WRONGTYPE", "%s, which was of type %s", key, kind)
	require.Equal(st, before, st.keys(), "%s is of the wrong type", key)
}

// playWithoutMemory runs a scene while Redis's memory is full. The scene says whether the script
// must be refused or must run as usual.
func playWithoutMemory(st *stage, sc scene, args []any, reply, after string) {
	ctx := st.Context()
	before := st.keys()
	st.s.SetTime(st.s, st.micros)
	require.NoError(st, st.s.ConfigSet(ctx, "maxmemory", "1").Err())
	got, err := st.s.Call(st.s, sc.script, modelKeys, args...).Result()
	require.NoError(st, st.s.ConfigSet(ctx, "maxmemory", "0").Err())
	if sc.refused {
		require.True(st, call.IsOOM(err), "%v", err)
		require.Equal(st, before, st.keys())
		return
	}
	require.NoError(st, err)
	if sc.script != "snapshot" { // it tells the id of an entry
		require.Equal(st, reply, fmt.Sprint(got))
	}
	require.Equal(st, after, st.keys())
}
