package audit

import (
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// numbers returns the numbers from from to to-1 as texts.
func numbers(from, to int) []any {
	var all []any
	for i := from; i < to; i++ {
		all = append(all, strconv.Itoa(i))
	}
	return all
}

// readQueue yields each element that stays exactly once, while other clients take elements from the
// head and add some at the end.
func TestReadQueueYieldsEachElementOnceWhileItMoves(t *testing.T) {
	t.Parallel()
	const all = 3 * pageSize
	for _, c := range []struct {
		name         string
		after        int // how many elements are read before the queue changes
		taken, added int // how many elements are then taken and added
		want         int // how many of the elements that were there at first are yielded
	}{
		{"still", 0, 0, 0, all},
		{"a few", 10, 7, 7, all},
		{"many", 400, 399, 50, all},
		{"the last one that was read", 500, 700, 0, all - 200},
		{"all that was read and more", 900, 1100, 10, all - 101}, // 999 + 400: a page begins with the last element of the page before
		{"more than a page", 1001, 990, 0, all},
		{"everything", 100, all, 0, pageSize},
		{"everything, and new ones come", 100, all, 20, pageSize},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url, prefix := redistest.Shared(t)
			w := newWorld(t, url, prefix, 1)
			key := prefix + "list"
			w.ok(w.c.RPush(w.Context(), key, numbers(0, all)...).Err())
			seen := map[string]int{}
			err := reader{cmd: w.c}.readQueue(w.Context(), key, all, func(e string) {
				seen[e]++
				if len(seen) != c.after {
					return
				}
				if c.taken > 0 {
					w.ok(w.c.LPopCount(w.Context(), key, c.taken).Err())
				}
				if c.added > 0 {
					w.ok(w.c.RPush(w.Context(), key, numbers(all, all+c.added)...).Err())
				}
			})
			require.NoError(t, err)
			for i := c.taken; i < all; i++ {
				require.Equal(t, 1, seen[strconv.Itoa(i)], i)
			}
			old := 0
			for e, n := range seen {
				require.Equal(t, 1, n, e)
				if i, err := strconv.Atoi(e); err == nil && i < all {
					old++
				}
			}
			require.Equal(t, c.want, old)
		})
	}
}

// More members than a page have the same score, and members come and go while they are read.
func TestReadByScoreYieldsEachMemberOnce(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		w := newWorld(t, url, prefix, 1)
		key := prefix + "set"
		for i := range 1500 {
			w.ok(w.c.ZAdd(w.Context(), key, redis.Z{Score: float64(1_700_000_000_000 + max(i, 1300)), Member: fmt.Sprint("m", i)}).Err())
		}
		var got []string
		err := reader{cmd: w.c}.readByScore(w.Context(), key, func(page []string) error {
			if len(got) == 0 {
				w.ok(w.c.ZRem(w.Context(), key, page[0], "m1499").Err())
				w.ok(w.c.ZAdd(w.Context(), key, redis.Z{Score: 1_700_000_001_500, Member: "new"}).Err())
			}
			got = append(got, page...)
			return nil
		})
		require.NoError(t, err)
		require.Len(t, got, 1500)
		slices.Sort(got)
		require.Len(t, slices.Compact(got), 1500)
		require.Contains(t, got, "new")
		require.NotContains(t, got, "m1499")
	})
}

// A job is not a duplicate because a scan yields its element twice.
func TestElementThatAScanRepeatsIsNotADuplicate(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	w.create("g", "acme", "T")
	w.append("g", jobs(20, later))
	p := w.space.Partition(0)
	blobs := w.c.ZRange(w.Context(), p.NonReadyOf("acme"), 0, 1).Val()
	w.addNonReady(p, "acme", blobs[1]+" ")

	a := &auditor{reader: reader{cmd: w.c}, space: w.space, p: p, opts: Options{Reducers: w.plans, stateBytes: maxStateBytes}}
	ps := a.newPass()
	w.ok(ps.readByScore(w.Context(), p.Groups(), func(ids []string) error { return ps.checkGroups(w.Context(), ids) }))
	w.ok(ps.readNonReady(w.Context(), "acme", p.NonReadyOf("acme")))
	w.ok(ps.readNonReady(w.Context(), "acme", p.NonReadyOf("acme")))
	w.ok(ps.checkTracked(w.Context(), ps.judgedSharedKinds()))
	n, _ := ledger.QueuedOrdinal(blobs[1][len("g|T|0|0|0|0|0|0|0|1700000000000|S|"):])
	require.Equal(t, map[finding]string{{LawLocation, "g", n, "duplicated1N!"}: "it is non-ready at attempt 0, and more than once in non-ready"}, ps.found.withSummaries())
}

func TestFindingsAreBounded(t *testing.T) {
	t.Parallel()
	var fs findings
	for g := range 200 {
		for i := range int64(2 * maxPerGroupAndLaw) {
			fs.add(finding{LawLocation, fmt.Sprint(g), i, "x"}, "detail")
		}
	}
	fs.add(finding{LawLocation, "0", 0, "x"}, "the same again")
	all := fs.withSummaries()
	require.Equal(t, "detail", all[finding{LawLocation, "0", 99, "x"}])
	require.Equal(t, "and 100 more like these", all[finding{LawLocation, "0", noOrdinal, "more"}])
	require.Equal(t, "and 20000 findings about more groups", all[finding{LawLocation, "", noOrdinal, "omitted"}])
	require.Len(t, all, maxFindings+100+1)
}

func TestReadingOfLinesAndBlobs(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]int64{
		`{"ordinal":17,"data":1}`: 17, `{"ordinal":3}`: 3, `{"data":{"ordinal":1},"ordinal":2}`: 2, `{ "ordinal" : 9 }`: 9,
		`{"ordinal":-1}`: -1, `{"ordinal":1.5}`: -1, `{"ordinal":"1"}`: -1, `{"data":1}`: -1, `17`: -1, ``: -1, `{"ordinal":`: -1,
	} {
		n, ok := parseResultLine(line)
		require.Equal(t, want >= 0, ok, line)
		if ok {
			require.Equal(t, want, n, line)
		}
	}
	for blob, want := range map[string]int64{"0|1||": 0, "12|1|00-x|{}": 12, "": -1, "12": -1, "|1||": -1, "-1|1||": -1, "x|1||": -1} {
		n, ok := ledger.QueuedOrdinal(blob)
		require.Equal(t, want >= 0, ok, blob)
		if ok {
			require.Equal(t, want, n, blob)
		}
	}
	nonReady, err := ledger.ParseJob("g|T|1|0|0|0|0|0|0|5|E|7|1||{\"a\":\"|\"}")
	require.NoError(t, err)
	require.Equal(t, ledger.ReasonError, nonReady.Reason)
	broken, err := ledger.ParseJob("g|T")
	require.Error(t, err)
	require.Zero(t, broken.Reason)
}
