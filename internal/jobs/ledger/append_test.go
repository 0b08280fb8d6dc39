package ledger_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestAppend(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		trace := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		r := w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{
			{Payload: []byte(`"a|b"`)}, {Type: "U", Payload: []byte(`"\n"`)}, {Payload: []byte(`{}`), TraceParent: trace},
		}})
		require.Equal(w, ledger.AppendReply{First: 0, N: 3}, r)
		require.Equal(w, ledger.AppendReply{First: 3, N: 2}, w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: jobs(2)}))

		require.Equal(w, map[string]int64{"waiting": 5}, w.ledger("g"))
		require.Equal(w, []string{`0||"a|b"`, `2|` + trace + `|{}`, `3||{"n":0}`, `4||{"n":1}`}, w.queue("g", "T"))
		require.Equal(w, []string{`1||"\n"`}, w.queue("g", "U"))
		require.Equal(w, "T|U", w.c.HGet(w.Context(), w.p.Group("g"), "types").Val())
		require.Equal(w, []string{"T", "U"}, w.c.ZRange(w.Context(), w.p.Types(), 0, -1).Val())
		require.Equal(w, map[string]string{"waiting": "4", "accepted": "4"}, w.c.HGetAll(w.Context(), w.p.Load("T")).Val())
		require.Equal(w, map[string]string{"active": "5", "unfinished": "5"}, w.c.HGetAll(w.Context(), w.p.Tenant("acme")).Val())
		require.Equal(w, []string{"acme"}, w.c.SMembers(w.Context(), w.p.Active()).Val())
		for _, typ := range []string{"T", "U"} {
			require.Equal(w, []string{"acme"}, w.c.ZRange(w.Context(), w.p.FairLane(typ, "normal"), 0, -1).Val())
			require.Equal(w, []string{"g"}, w.c.ZRange(w.Context(), w.p.FairTenant(typ, "normal", "acme"), 0, -1).Val())
		}
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("fetcher")).Val())
	})
}

// queue returns the queued blobs of a group and type in order, without the acceptance times. It
// checks that these are within a minute of now.
func (w *world) queue(group, typ string) []string {
	w.Helper()
	blobs := w.c.LRange(w.Context(), w.p.Queue(group, typ), 0, -1).Val()
	for i, blob := range blobs {
		ordinal, rest, _ := strings.Cut(blob, "|")
		accepted, rest, ok := strings.Cut(rest, "|")
		require.True(w, ok, blob)
		require.WithinDuration(w, time.Now(), time.UnixMilli(number(accepted)), time.Minute)
		blobs[i] = ordinal + "|" + rest
	}
	return blobs
}

// TestAppendTwice: a repeated append changes nothing and is reported as a duplicate, with each kind
// of request id, and with a mode alone.
func TestAppendTwice(t *testing.T) {
	onStores(t, func(w *world) {
		calls := map[string]ledger.AppendArgs{
			"request":             {Request: "r#0"},
			"entry":               {Request: ledger.EntryRequest("1700000000000-7") + "#0"},
			"last of a submit":    {Mode: ledger.AppendLast},
			"seal":                {Mode: ledger.AppendSeal},
			"request that seals":  {Request: "r#1", Mode: ledger.AppendSeal},
			"request for a total": {Request: "r#2"},
			"piece":               {Request: ledger.SubmissionPrefix + "0"},
		}
		for name, a := range calls {
			a.Group, a.Jobs = strings.ReplaceAll(name, " ", "-"), jobs(3)
			w.create(a.Group, "acme", "T", "total", "3")
			require.False(w, w.appendJobs(a).Duplicate, name)
			w.unchanged(func() { require.Equal(w, ledger.AppendReply{Duplicate: true}, w.appendJobs(a), name) })
			require.Equal(w, map[string]int64{"waiting": 3}, w.ledger(a.Group))
		}
		require.ElementsMatch(w, []string{"r#0", "r#1", "r#2"}, w.c.ZRange(w.Context(), w.p.Messages(), 0, -1).Val())
		entries := w.c.ZRangeWithScores(w.Context(), w.p.Entries(), 0, -1).Val()
		require.Len(w, entries, 1)
		require.Equal(w, float64(1700000000000), entries[0].Score, "entries are forgotten by their own time")
	})
}

// TestAppendPieces: pieces of a submission that are repeated, before and after the last piece has
// sealed the group, are duplicates and change nothing. No request ids are stored for them.
func TestAppendPieces(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		piece := func(n int, mode ledger.AppendMode) bool {
			return w.appendJobs(ledger.AppendArgs{Group: "g", Request: ledger.SubmissionPrefix + fmt.Sprint(n), Mode: mode, Jobs: jobs(2)}).Duplicate
		}
		require.False(w, piece(0, ledger.AppendMore))
		require.False(w, piece(1, ledger.AppendMore))
		w.unchanged(func() { // the process dies and repeats all pieces
			require.True(w, piece(0, ledger.AppendMore))
			require.True(w, piece(1, ledger.AppendMore))
		})
		require.False(w, piece(2, ledger.AppendSeal))
		w.unchanged(func() {
			require.True(w, piece(0, ledger.AppendMore))
			require.True(w, piece(2, ledger.AppendSeal))
		})
		require.Equal(w, map[string]int64{"waiting": 6}, w.ledger("g"))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Messages()).Val())
	})
}

// TestAppendAfterALostPiece: a piece of a submission is refused with ErrGap while an earlier piece
// is missing, as after a failover that lost it, and accepted once that one was appended.
func TestAppendAfterALostPiece(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		piece := func(n int, mode ledger.AppendMode) ledger.AppendArgs {
			return ledger.AppendArgs{Group: "g", Request: ledger.SubmissionPrefix + fmt.Sprint(n), Mode: mode, Limit: 100, Jobs: jobs(2)}
		}
		refused := func(a ledger.AppendArgs, there string) {
			w.unchanged(func() {
				_, err := ledger.Append(w.Context(), w.c, w.p, a)
				require.ErrorIs(w, err, ledger.ErrGap)
				require.ErrorIs(w, err, api.ErrUnavailable)
				require.ErrorContains(w, err, there)
			})
		}
		refused(piece(1, ledger.AppendMore), "piece 1: 0 are there")
		refused(piece(1, ledger.AppendSeal), "piece 1: 0 are there")
		require.False(w, w.appendJobs(piece(0, ledger.AppendMore)).Duplicate)
		for _, mode := range []ledger.AppendMode{ledger.AppendMore, ledger.AppendLast, ledger.AppendSeal} {
			refused(piece(2, mode), "piece 2: 1 are there")
		}
		require.False(w, w.appendJobs(piece(1, ledger.AppendMore)).Duplicate)
		require.False(w, w.appendJobs(piece(2, ledger.AppendLast)).Duplicate)
		require.True(w, w.appendJobs(piece(2, ledger.AppendLast)).Duplicate)
		refused(piece(4, ledger.AppendLast), "piece 4: 3 are there") // the last piece is refused while an earlier one is missing
		require.Equal(w, map[string]int64{"waiting": 6}, w.ledger("g"))
	})
}

func TestAppendSeals(t *testing.T) {
	onStores(t, func(w *world) {
		sealed := func(group string) bool { return w.c.HExists(w.Context(), w.p.Group(group), "sealed").Val() }
		w.fill("total", 4, "acme", "T", "total", "5")
		require.False(w, sealed("total"))
		w.append("total", 1)
		require.True(w, sealed("total"))

		w.create("mode", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "mode", Mode: ledger.AppendLast, Jobs: jobs(1)})
		require.False(w, sealed("mode"), "the last of a submission may be followed by appends")
		w.appendJobs(ledger.AppendArgs{Group: "mode", Jobs: jobs(1)})

		w.create("seal", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "seal", Mode: ledger.AppendSeal, Jobs: jobs(1)})
		require.True(w, sealed("seal"))
		require.ElementsMatch(w, []string{"total", "seal"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
	})
}

func TestAppendRefuses(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("total", 1, "acme", "T", "total", "2")
		w.create("sealed", "acme", "T")
		w.seal("sealed")
		w.fill("cancelled", 1, "acme", "T")
		w.cancel("cancelled")
		w.fill("limited", 4, "acme", "T")
		for _, c := range []struct {
			args ledger.AppendArgs
			want error
			says string
		}{
			{ledger.AppendArgs{Group: "nobody"}, api.ErrNotFound, "group nobody"},
			{ledger.AppendArgs{Group: "total"}, api.ErrConflict, "2 jobs were announced, 1 are there, 2 more are too many"},
			{ledger.AppendArgs{Group: "sealed"}, api.ErrSealed, "is CREATED and takes no more jobs"},
			{ledger.AppendArgs{Group: "sealed", Mode: ledger.AppendSeal}, api.ErrSealed, "is CREATED and takes no more jobs"},
			{ledger.AppendArgs{Group: "cancelled", Request: "r"}, api.ErrSealed, "is CANCELLED and takes no more jobs"},
			{ledger.AppendArgs{Group: "limited", Limit: 5}, api.ErrConflict, "a group holds at most 5 jobs, 4 are there"},
		} {
			c.args.Jobs, c.args.Limit = jobs(2), max(c.args.Limit, 5)
			w.unchanged(func() {
				_, err := ledger.Append(w.Context(), w.c, w.p, c.args)
				require.ErrorIs(w, err, c.want)
				require.ErrorContains(w, err, c.says)
			})
		}
	})
}

// TestAppendLargePayloads: payloads of 4,097 bytes, of a waiting and of a scheduled job, are stored
// in the group's payloads hash. One of 4,096 bytes is in the blob.
func TestAppendLargePayloads(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		fits, travels := strings.Repeat("x", 4096), strings.Repeat("y", 4097)
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{
			{Payload: []byte(travels)}, {Payload: []byte(fits)}, {Payload: []byte(travels), RunAt: new(time.Now().Add(time.Hour))},
		}})
		require.Equal(w, map[string]string{"0": travels, "2": travels}, w.c.HGetAll(w.Context(), w.p.Payloads("g")).Val())
		require.Equal(w, []string{"0||", "1||" + fits}, w.queue("g", "T"))
	})
}

// TestAppendJobsForLater: a job with a RunAt later than now, and than its group's run_at, is
// appended as non-ready and due at RunAt. With an earlier RunAt, or with none, it is waiting.
func TestAppendJobsForLater(t *testing.T) {
	onStores(t, func(w *world) {
		now, soon := time.Now(), time.Now().Add(time.Hour)
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{
			{Payload: []byte("1"), RunAt: new(soon.Add(time.Hour))}, {Payload: []byte("2"), RunAt: new(now.Add(-time.Hour))}, {Type: "U", Payload: []byte("3"), RunAt: new(soon)},
		}})
		require.Equal(w, "NWN", w.states("g"))
		require.Equal(w, map[string]int64{"waiting": 1, "non_ready": 2}, w.ledger("g"))
		nonReady := w.c.ZRangeWithScores(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val()
		require.Len(w, nonReady, 2)
		require.Equal(w, float64(soon.UnixMilli()), nonReady[0].Score)
		require.Regexp(w, `^g\|U\|0\|0\|0\|0\|0\|0\|0\|\d+\|S\|2\|\d+\|\|3$`, nonReady[0].Member)
		require.Equal(w, float64(soon.UnixMilli()), w.c.ZScore(w.Context(), w.p.NonReady(), "acme").Val(), "the index holds the earliest")
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Load("U"), "non_ready").Val())
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val(), "what is scheduled wants no permit yet")
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("dispatcher")).Val())

		w.create("later", "beta", "T", "run_at", timestamp(soon))
		w.appendJobs(ledger.AppendArgs{Group: "later", Jobs: []ledger.NewJob{
			{Payload: []byte("1"), RunAt: new(soon.Add(time.Hour))}, {Payload: []byte("2"), RunAt: new(soon.Add(-time.Minute))}, {Payload: []byte("3")},
		}})
		require.Equal(w, "NWW", w.states("later"))
	})
}

// TestAppendToAGroupThatIsHeld: three jobs of a group with a run_at in an hour are waiting, but in
// no lane, and none is admitted. A job of a group with a run_at in the past is admitted.
func TestAppendToAGroupThatIsHeld(t *testing.T) {
	onStores(t, func(w *world) {
		soon := time.Now().Add(time.Hour)
		w.fill("g", 2, "acme", "T", "run_at", timestamp(soon))
		w.append("g", 1)
		require.Equal(w, map[string]int64{"waiting": 3}, w.ledger("g"))
		require.Equal(w, float64(soon.UnixMilli()), w.c.ZScore(w.Context(), w.p.Scheduled(), "g").Val())
		require.Zero(w, w.c.Exists(w.Context(), w.p.FairLane("T", "normal"), w.p.Active()).Val())
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 10, noLimit).State)

		w.fill("past", 1, "acme", "T", "run_at", timestamp(time.Now().Add(-time.Hour)))
		require.Equal(w, 1, w.admit("T", 10, noLimit).Moved, "its time has come")
	})
}

// TestAppendManyKeepsTheOrder: of 3 * MaxAppend + 1 jobs, which four calls append, every second one
// has type U. The queue of U holds its jobs by ordinal.
func TestAppendManyKeepsTheOrder(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		const n = 3*ledger.MaxAppend + 1
		all := make([]ledger.NewJob, n)
		var want []string
		for i := range all {
			all[i] = ledger.NewJob{Type: []string{"T", "U"}[i%2], Payload: fmt.Append(nil, i)}
			if i%2 == 1 {
				want = append(want, fmt.Sprintf("%d||%d", i, i))
			}
		}
		for piece := range slices.Chunk(all, ledger.MaxAppend) {
			w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: piece})
		}
		require.Equal(w, want, w.queue("g", "U"))
		require.Equal(w, map[string]int64{"waiting": n}, w.ledger("g"))
	})
}

// TestAppendOfManyTypes: in a group with 100,001 types, an append with MaxAppend new types takes
// less than 10 times as long as one with one. The new types come last, in their order.
func TestAppendOfManyTypes(t *testing.T) {
	onRedis(t, func(w *world) {
		w.create("g", "t", "T")
		var known strings.Builder
		for i := range 100_000 {
			fmt.Fprintf(&known, "KNOWN-%06d|", i)
		}
		require.NoError(w, w.c.HSet(w.Context(), w.p.Group("g"), "types", known.String()+"T").Err())
		appendTypes := func(name string, n int) time.Duration {
			var fresh []ledger.NewJob
			for i := range n {
				fresh = append(fresh, ledger.NewJob{Type: fmt.Sprint(name, i), Payload: []byte("1")})
			}
			began := time.Now()
			w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: fresh})
			return time.Since(began)
		}
		one := appendTypes("ONE-", 1)
		require.Less(w, appendTypes("MANY-", ledger.MaxAppend), 10*one)
		types := strings.Split(w.c.HGet(w.Context(), w.p.Group("g"), "types").Val(), "|")
		require.Len(w, types, 100_002+ledger.MaxAppend)
		require.Equal(w, []string{"T", "ONE-0", "MANY-0", "MANY-1"}, types[100_000:100_004])
	})
}

// many appends the jobs of several requests in one call. It returns one result for each request, in
// their order.
func (w *world) many(group string, limit int64, requests ...ledger.Request) []ledger.AppendResult {
	w.Helper()
	results, err := ledger.AppendMany(w.Context(), w.c, w.p, group, limit, 0, requests)
	require.NoError(w, err)
	require.Len(w, results, len(requests))
	return results
}

func TestAppendMany(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Request: "m#known", Jobs: jobs(1)})
		typed := jobs(2)
		typed[1].Type = "U"
		requests := []ledger.Request{
			{ID: "@1700000000000-0", Jobs: jobs(3)},
			{ID: "m#known", Jobs: jobs(1)},
			{ID: "m#new", Jobs: typed},
			{ID: "m#new", Jobs: typed}, // the same message twice in one read
			{ID: "m#large", Jobs: jobs(9)},
			{ID: "m#none"},
			{ID: "m#last", Jobs: jobs(1)},
		}
		r := w.many("g", 10, requests...)
		require.Equal(w, ledger.AppendReply{First: 1, N: 3}, r[0].AppendReply)
		require.True(w, r[1].Duplicate)
		require.Equal(w, ledger.AppendReply{First: 4, N: 2}, r[2].AppendReply)
		require.True(w, r[3].Duplicate)
		require.ErrorIs(w, r[4].Err, api.ErrConflict)
		require.ErrorContains(w, r[4].Err, "at most 10 jobs, 6 are there")
		require.Equal(w, ledger.AppendReply{First: 6}, r[5].AppendReply)
		require.Equal(w, ledger.AppendReply{First: 6, N: 1}, r[6].AppendReply)
		require.Equal(w, "W!W!W!W!W!W!W!", w.c.Get(w.Context(), w.p.States("g")).Val())
		require.EqualValues(w, 6, w.c.LLen(w.Context(), w.p.Queue("g", "T")).Val())
		require.EqualValues(w, 1, w.c.LLen(w.Context(), w.p.Queue("g", "U")).Val())
		for _, again := range w.many("g", 10, requests[0], requests[2], requests[5], requests[6]) {
			require.True(w, again.Duplicate)
		}
		require.Equal(w, map[string]int64{"waiting": 7}, w.ledger("g"))
	})
}

// TestAppendManySeals: 3 jobs are announced. Of one call's requests a adds 2, b is refused because
// 2 more are too many, and c adds the last. Then a repeated is a duplicate, and d is refused
// because the group is sealed. In an unknown group all requests are refused.
func TestAppendManySeals(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.sealWith("g", 3, false, nil)
		r := w.many("g", 10, ledger.Request{ID: "a", Jobs: jobs(2)}, ledger.Request{ID: "b", Jobs: jobs(2)}, ledger.Request{ID: "c", Jobs: jobs(1)},
			ledger.Request{ID: "a", Jobs: jobs(2)}, ledger.Request{ID: "d"})
		require.NoError(w, r[0].Err)
		require.ErrorContains(w, r[1].Err, "3 jobs were announced, 2 are there, 2 more are too many")
		require.NoError(w, r[2].Err)
		require.True(w, r[3].Duplicate)
		require.ErrorIs(w, r[4].Err, api.ErrSealed)
		for _, none := range w.many("nobody", 10, ledger.Request{ID: "a"}, ledger.Request{ID: "b"}) {
			require.ErrorIs(w, none.Err, api.ErrNotFound)
		}
	})
}

// TestAppendByRedisClock: appended jobs have the acceptance time of Redis's clock, which a
// miniredis sets to a time in 2023, and not of the clock of the process that composed their blobs.
func TestAppendByRedisClock(t *testing.T) {
	t.Parallel()
	server, url := redistest.Mini(t)
	server.SetTime(time.UnixMilli(1_700_000_000_000))
	w := newWorld(t, client(t, url), "t:")
	w.fill("g", 2, "acme", "T")
	require.Equal(t, []string{`0|1700000000000||{"n":0}`, `1|1700000000000||{"n":1}`}, w.c.LRange(t.Context(), w.p.Queue("g", "T"), 0, -1).Val())
}

// TestAppendUnderAnyID: the request ids pieces, =, @, =x and @1 look like ids with a meaning for
// the script. Of two requests of one call with such an id, the first adds a job and the second is a
// duplicate.
func TestAppendUnderAnyID(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		for i, id := range []string{"pieces", "=", "@", "=x", "@1"} {
			r := w.many("g", 10, ledger.Request{ID: id, Jobs: jobs(1)}, ledger.Request{ID: id, Jobs: jobs(1)})
			require.Equal(w, ledger.AppendReply{First: int64(i), N: 1}, r[0].AppendReply, id)
			require.True(w, r[1].Duplicate, id)
		}
	})
}

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
			onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
		w.fill("g", 6, "acme", "T")
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
