package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
	w.create("g", "acme", "T")
	w.append("g", 2)
	require.Equal(t, []string{`0|1700000000000||{"n":0}`, `1|1700000000000||{"n":1}`}, w.c.LRange(t.Context(), w.p.Queue("g", "T"), 0, -1).Val())
}

// TestAppendUnderAnyID: the request ids pieces, =, @, =x and @1 look like ids with a meaning for
// the script. Of two requests of one call with such an id, the first adds a job and the second is a
// duplicate.
func TestAppendUnderAnyID(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		for i, id := range []string{"pieces", "=", "@", "=x", "@1"} {
			r := w.many("g", 10, ledger.Request{ID: id, Jobs: jobs(1)}, ledger.Request{ID: id, Jobs: jobs(1)})
			require.Equal(w, ledger.AppendReply{First: int64(i), N: 1}, r[0].AppendReply, id)
			require.True(w, r[1].Duplicate, id)
		}
	})
}
