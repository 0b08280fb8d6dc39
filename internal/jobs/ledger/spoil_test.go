package ledger_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// quiet removes the wake tokens of idle roles, so that a script has to push new ones.
func (w *world) quiet() {
	for _, role := range []string{"fetcher", "dispatcher", "watcher"} {
		require.NoError(w, w.c.Del(w.Context(), w.p.Wake(role)).Err())
	}
}

// TestWrongTypesChangeNothing: an error does not undo earlier writes of a script. So a script must
// notice a key of the wrong Redis type before its first write. The test spoils every key that a
// scene changes, one at a time.
func TestWrongTypesChangeNothing(t *testing.T) {
	for _, s := range scenes {
		t.Run(s.name, func(t *testing.T) {
			both(t, func(w *world) {
				prefix, n := strings.TrimSuffix(w.p.Base(), "{0}:"), 0
				fresh := func() (*world, act) {
					n++
					v := newWorld(w, w.c, prefix+fmtInt(int64(n))+":")
					do := s.prepare(v)
					v.quiet()
					return v, do
				}
				v, do := fresh()
				before := v.dump()
				require.NoError(w, do())
				after := v.dump()
				changed := changes(before, after)
				require.NotEmpty(w, changed, "the scene must change something")
				for _, key := range changed {
					v, do := fresh()
					v.spoil(v.p.Base()+key, before[key]+after[key])
					spoiled := v.dump()
					err := do()
					if _, stays := after[key]; err == nil && (!stays || key == "policy") {
						continue // the script deletes or replaces this key, whatever its type
					}
					require.ErrorContainsf(w, err, "WRONGTYPE", "%s is of the wrong type", key)
					require.Equal(w, spoiled, v.dump(), "%s is of the wrong type", key)
				}
			})
		})
	}
}

// changes returns the keys that differ.
func changes(before, after map[string]string) []string {
	var keys []string
	for key, v := range after {
		if before[key] != v {
			keys = append(keys, key)
		}
	}
	for key := range before {
		if _, ok := after[key]; !ok {
			keys = append(keys, key)
		}
	}
	return keys
}

// spoil replaces a key by a key of another Redis type. content, as dump returns it, says which type
// the key has.
func (w *world) spoil(key, content string) {
	w.Helper()
	require.NoError(w, w.c.Del(w.Context(), key).Err())
	if strings.HasPrefix(content, "list") {
		require.NoError(w, w.c.Set(w.Context(), key, "spoiled", 0).Err())
	} else {
		require.NoError(w, w.c.RPush(w.Context(), key, "spoiled").Err())
	}
}

// TestOutOfMemory: when Redis's memory is full, scripts that take work in are refused without any
// change. All others leave the data that they leave otherwise, compared by shape.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	c := server.Client()
	memory := func(bytes string) { require.NoError(t, c.ConfigSet(t.Context(), "maxmemory", bytes).Err()) }
	for i, s := range scenes {
		t.Run(s.name, func(t *testing.T) { // one after the other, because they share the server's memory
			prepare := func(suffix string) (*world, act) {
				w := newWorld(t, c, fmtInt(int64(i))+suffix)
				do := s.prepare(w)
				w.quiet()
				return w, do
			}
			twin, asEver := prepare("twin:")
			require.NoError(t, asEver())

			w, do := prepare("oom:")
			before := w.dump()
			memory("1")
			err := do()
			memory("0")
			if s.takesMore {
				require.Truef(t, call.IsOOM(err), "%v", err)
				require.Equal(t, before, w.dump())
				return
			}
			require.NoError(t, err)
			require.Equal(t, shape(twin.dump()), shape(w.dump()))
		})
	}
}

var (
	snapshots = regexp.MustCompile(`snapshot:\[.*?\]`)
	numbers   = regexp.MustCompile(`[0-9.]+(e\+[0-9]+)?`)
)

// shape returns a dump without its numbers and snapshots, because most numbers are times and differ
// from run to run.
func shape(dump map[string]string) map[string]string {
	out := map[string]string{}
	for key, v := range dump {
		out[key] = numbers.ReplaceAllString(snapshots.ReplaceAllString(v, "snapshot"), "#")
	}
	return out
}
