package ledger_test

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// keyed returns one new job for each of the keys. typ, if not "", is their type, which makes the
// script compose their blobs instead of Append.
func keyed(typ string, keys ...string) []ledger.NewJob {
	all := jobs(len(keys))
	for i, key := range keys {
		all[i].Key, all[i].Type = key, typ
	}
	return all
}

// TestUniqueKeys: Append to a group with unique keys leaves out each job whose key another job of
// the group has. A repeated request is a duplicate that names the same skipped jobs, and FindKey
// finds the jobs.
func TestUniqueKeys(t *testing.T) {
	for name, typ := range map[string]string{"composed by the caller": "", "composed by the script": "T"} {
		t.Run(name, func(t *testing.T) {
			both(t, func(w *world) {
				w.create("g", "acme", "T", "unique_keys", "1")
				first := ledger.AppendArgs{Group: "g", Request: "r#0", Jobs: keyed(typ, "a", "", "b", "a", "", "b|c")}
				require.Equal(w, ledger.AppendReply{N: 5, Skipped: []int{3}}, w.appendJobs(first))
				again := ledger.AppendReply{Duplicate: true, Skipped: []int{3}}
				require.Equal(w, again, w.appendJobs(first))

				r := w.many("g", 10,
					ledger.Request{ID: "m#1", Jobs: keyed(typ, "d", "b")},
					ledger.Request{ID: "m#2", Jobs: keyed(typ, "d", "a", "e")},
					ledger.Request{ID: "m#2", Jobs: keyed(typ, "d", "a", "e")},
					ledger.Request{ID: "m#3", Jobs: keyed(typ, "e", "d")})
				require.Equal(w, ledger.AppendReply{First: 5, N: 1, Skipped: []int{1}}, r[0].AppendReply)
				require.Equal(w, ledger.AppendReply{First: 6, N: 1, Skipped: []int{0, 1}}, r[1].AppendReply)
				require.Equal(w, ledger.AppendReply{Duplicate: true, Skipped: []int{0, 1}}, r[2].AppendReply)
				require.Equal(w, ledger.AppendReply{First: 7, Skipped: []int{0, 1}}, r[3].AppendReply)
				require.Equal(w, again, w.appendJobs(first))

				require.Equal(w, map[string]int64{"waiting": 7}, w.ledger("g"))
				require.Equal(w, "W!W!W!W!W!W!W!", w.c.Get(w.Context(), w.p.States("g")).Val())
				require.EqualValues(w, 7, w.c.LLen(w.Context(), w.p.Queue("g", "T")).Val())
				w.admit("T", 10, noLimit)
				at := map[string]int64{}
				for _, j := range w.read("T", "c") {
					at[j.Key()] = j.Ordinal
				}
				for key, ordinal := range map[string]int64{"a": 0, "b": 2, "b|c": 4, "d": 5, "e": 6} {
					found, unique, err := ledger.FindKey(w.Context(), w.c, w.p, "g", key)
					require.NoError(w, err)
					require.True(w, unique)
					require.Equal(w, []int64{ordinal, ordinal}, []int64{found, at[key]}, key)
				}
				found, unique, err := ledger.FindKey(w.Context(), w.c, w.p, "g", "x")
				require.NoError(w, err)
				require.True(w, unique)
				require.EqualValues(w, -1, found)
			})
		})
	}
}

// TestUniqueKeysAndTotal: the limit of a group and its announced total count only jobs that are
// added, not those that are left out.
func TestUniqueKeysAndTotal(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T", "unique_keys", "1", "total", "3")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: keyed("", "a", "b")})
		r := w.many("g", 3, ledger.Request{ID: "m#1", Jobs: keyed("", "a", "c")}, ledger.Request{ID: "m#2", Jobs: keyed("", "d")})
		require.Equal(w, ledger.AppendReply{First: 2, N: 1, Skipped: []int{0}}, r[0].AppendReply)
		require.ErrorIs(w, r[1].Err, api.ErrSealed)
		found, _, err := ledger.FindKey(w.Context(), w.c, w.p, "g", "d")
		require.NoError(w, err)
		require.EqualValues(w, -1, found, "a refused request takes no key")
	})
}

// TestKeysWithoutIndex: without unique keys, a group takes two jobs with one key and has no index
// of keys.
func TestKeysWithoutIndex(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		require.Equal(w, ledger.AppendReply{N: 2}, w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: keyed("", "a", "a")}))
		require.Zero(w, w.c.Exists(w.Context(), w.p.KeyIndex("g")).Val())
		_, unique, err := ledger.FindKey(w.Context(), w.c, w.p, "g", "a")
		require.NoError(w, err)
		require.False(w, unique)
	})
}

// TestListJobs: ListJobs returns the jobs in a state, and looks at a bounded number of jobs; the
// next call continues where it stopped.
func TestListJobs(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 6)
		w.admit("T", 4, noLimit)
		taken := w.read("T", "c")
		w.start("T", taken)
		w.outcome("T", other(ledger.OutcomeFailed, taken[1], 0))
		w.outcome("T", other(ledger.OutcomeRetry, taken[2], 1000))

		list := func(state string, from int64, most int) (ordinals []int64, next int64) {
			found, next, err := ledger.ListJobs(w.Context(), w.c, w.p, "g", state, from, most)
			require.NoError(w, err)
			for _, j := range found {
				ordinals = append(ordinals, j.Ordinal)
				require.Equal(w, j.Ordinal == 1 || j.Ordinal == 2, j.LastError() != nil, strconv.FormatInt(j.Ordinal, 10))
			}
			return ordinals, next
		}
		check := func(state string, from int64, most int, want []int64, wantNext int64) {
			got, next := list(state, from, most)
			require.Equal(w, want, got)
			require.Equal(w, wantNext, next)
		}
		check("", 0, 10, []int64{0, 1, 2, 3, 4, 5}, -1)
		check("", 0, 4, []int64{0, 1, 2, 3}, 4)
		check("", 4, 4, []int64{4, 5}, -1)
		check("waiting", 0, 10, []int64{4, 5}, -1)
		check("failed", 0, 10, []int64{1}, -1)
		check("in_flight", 0, 1, []int64{0}, 3)
		check("non_ready", 0, 10, []int64{2}, -1)
		check("done", 0, 10, nil, -1)
		check("", 100, 10, nil, -1)

		many := make([]byte, 600_000*2)
		for i := range many {
			many[i] = "D!"[i%2]
		}
		copy(many[599_999*2:], "F!")
		w.c.Set(w.Context(), w.p.States("g"), many, 0)
		check("failed", 10, 10, nil, 10+16*32768)
		got, next, err := ledger.ListJobs(w.Context(), w.c, w.p, "g", "failed", 10+16*32768, 10)
		require.NoError(w, err)
		require.EqualValues(w, -1, next)
		require.EqualValues(w, 599_999, got[0].Ordinal)
	})
}
