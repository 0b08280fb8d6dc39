package read_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t *testing.T, url string) redis.UniversalClient {
	t.Helper()
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn.Cmd
}

// numbers returns the numbers from from to to-1 as texts.
func numbers(from, to int) []any {
	var all []any
	for i := from; i < to; i++ {
		all = append(all, strconv.Itoa(i))
	}
	return all
}

// TestReadQueueYieldsEachElementOnceWhileItMoves: ReadQueue yields each element that stays exactly
// once, while other clients take elements from the head and add some at the end.
func TestReadQueueYieldsEachElementOnceWhileItMoves(t *testing.T) {
	t.Parallel()
	const all = 3 * read.PageSize
	for _, tt := range []struct {
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
		{"everything", 100, all, 0, read.PageSize},
		{"everything, and new ones come", 100, all, 20, read.PageSize},
	} {
		t.Run(tt.name, func(t *testing.T) {
			url, prefix := redistest.Parallel(t)
			c := connect(t, url)
			key := prefix + "list"
			require.NoError(t, c.RPush(t.Context(), key, numbers(0, all)...).Err())
			seen := map[string]int{}
			err := read.Reader{Cmd: c}.ReadQueue(t.Context(), key, all, func(e string) error {
				seen[e]++
				if len(seen) != tt.after {
					return nil
				}
				if tt.taken > 0 {
					require.NoError(t, c.LPopCount(t.Context(), key, tt.taken).Err())
				}
				if tt.added > 0 {
					require.NoError(t, c.RPush(t.Context(), key, numbers(all, all+tt.added)...).Err())
				}
				return nil
			})
			require.NoError(t, err)
			for i := tt.taken; i < all; i++ {
				require.Equal(t, 1, seen[strconv.Itoa(i)], i)
			}
			old := 0
			for e, n := range seen {
				require.Equal(t, 1, n, e)
				if i, err := strconv.Atoi(e); err == nil && i < all {
					old++
				}
			}
			require.Equal(t, tt.want, old)
		})
	}
}

// TestReadByScoreYieldsEachMemberOnce: the test gives more members than a page holds the same
// score, and adds and removes members while they are read.
func TestReadByScoreYieldsEachMemberOnce(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		c := connect(t, url)
		key := prefix + "set"
		for i := range 1500 {
			require.NoError(t, c.ZAdd(t.Context(), key, redis.Z{Score: float64(1_700_000_000_000 + max(i, 1300)), Member: fmt.Sprint("m", i)}).Err())
		}
		var got []string
		err := read.Reader{Cmd: c}.ReadByScore(t.Context(), key, func(page []string) error {
			if len(got) == 0 {
				require.NoError(t, c.ZRem(t.Context(), key, page[0], "m1499").Err())
				require.NoError(t, c.ZAdd(t.Context(), key, redis.Z{Score: 1_700_000_001_500, Member: "new"}).Err())
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

// TestBatches: Batches holds each batch to both bounds, unless a single item exceeds one.
func TestBatches(t *testing.T) {
	t.Parallel()
	type item struct {
		commands int
		bytes    int64
	}
	for _, tt := range []struct {
		name  string
		items []item
		want  []int // the sizes of the batches
	}{
		{"nothing", nil, nil},
		{"one", []item{{1, 1}}, []int{1}},
		{"exactly a page", []item{{read.PageSize - 1, 0}, {1, read.PageBytes}}, []int{2}},
		{"a command more", []item{{read.PageSize - 1, 0}, {2, 0}, {1, 0}}, []int{1, 2}},
		{"a byte more", []item{{1, read.PageBytes}, {1, 1}}, []int{1, 1}},
		{"items that are too large", []item{{read.PageSize + 1, 0}, {1, 2 * read.PageBytes}, {1, 1}, {1, 1}}, []int{1, 1, 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var sizes []int
			var all []item
			for batch := range read.Batches(tt.items, func(i item) (int, int64) { return i.commands, i.bytes }) {
				sizes = append(sizes, len(batch))
				all = append(all, batch...)
			}
			require.Equal(t, tt.want, sizes)
			require.Equal(t, tt.items, all)
		})
	}
}

// TestGroup: one transaction reads a group's counts, the lengths of its queues, and which of its
// keys have the wrong Redis type. The fingerprint changes with a count and with the length of a
// queue.
func TestGroup(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		c := connect(t, url)
		space, err := keyspace.New(prefix, 1)
		require.NoError(t, err)
		p := space.Partition(0)
		require.NoError(t, c.HSet(t.Context(), p.Group("g"), "types", "T|U", "tenant", "acme", "accepted", 3, "waiting", 3).Err())
		require.NoError(t, c.RPush(t.Context(), p.Queue("g", "U"), "a", "b").Err())
		require.NoError(t, c.Set(t.Context(), p.Failures("g"), "x", 0).Err())
		reader := read.Reader{Cmd: c}
		headers, err := reader.Headers(t.Context(), p, []string{"g", "gone"})
		require.NoError(t, err)
		require.Equal(t, []read.Header{{ID: "g", Tenant: "acme", Types: "T|U", Accepted: 3}, {ID: "gone"}}, headers)
		get := func() *read.Group {
			var group func() *read.Group
			require.NoError(t, reader.Transaction(t.Context(), func(pipe redis.Pipeliner) {
				group = read.Numbers.Queue(t.Context(), pipe, p, headers[0])
			}))
			return group()
		}
		g := get()
		require.Equal(t, []int64{0, 2}, g.Queues)
		require.EqualValues(t, 2, g.Queued())
		require.EqualValues(t, 3, g.Int("waiting"))
		require.Equal(t, []string{p.Failures("g")}, g.WrongTypes)
		require.Equal(t, g.Fingerprint(), get().Fingerprint())
		require.NoError(t, c.HIncrBy(t.Context(), p.Group("g"), "waiting", 1).Err())
		counted := get().Fingerprint()
		require.NotEqual(t, g.Fingerprint(), counted)
		require.NoError(t, c.RPush(t.Context(), p.Queue("g", "T"), "c").Err())
		require.NotEqual(t, counted, get().Fingerprint())
	})
}
