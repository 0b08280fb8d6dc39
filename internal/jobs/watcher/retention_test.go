package watcher_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// end creates n groups of one job each, ends their jobs and moves the groups to a final status. The
// first group's job has failed.
func end(w *stagetest.World, n int) {
	w.T.Helper()
	for i := range n {
		w.Jobs(fmt.Sprint("g", i), "T", 1)
	}
	w.Admit("T")
	jobs := w.Take("T", "c", n)
	w.Fail("BOOM", jobs[0])
	for _, j := range jobs[1:] {
		w.Done("null", j)
	}
	w.Reduce()
	ctx := context.WithoutCancel(w.T.Context())
	fence, err := ledger.Lead(ctx, w.Conn.Cmd, w.P, "test", time.Minute)
	require.NoError(w.T, err)
	for i := range n {
		_, err := ledger.Advance(ctx, w.Conn.Cmd, w.P, fmt.Sprint("g", i), fence)
		require.NoError(w.T, err)
	}
	_, err = ledger.Lead(ctx, w.Conn.Cmd, w.P, "test", 0)
	require.NoError(w.T, err)
}

func TestExpiresGroups(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	ctx := t.Context()
	const n = 110 // more than one batch
	end(w, n)
	w.Jobs("open", "T", 1)
	<-time.After(20 * time.Millisecond)
	run(w, watcher.Config{Retention: watcher.Retention{Groups: 10 * time.Millisecond, DeadLetters: 10 * time.Millisecond, MessageIDs: time.Nanosecond}}, "w")
	w.Await("the end of the expired groups", func() bool { return w.Conn.Cmd.ZCard(ctx, w.P.Groups()).Val() == 1 })
	w.Await("the open group's events", func() bool { return len(ids(w, "open")) == 2 })
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts("open"))
	for i := range n {
		_, err := w.Store.Group(auth.Trust(ctx), fmt.Sprint("g", i))
		require.ErrorIs(t, err, api.ErrNotFound)
	}
	// No key of the expired groups is left.
	var keys []string
	w.Await("the end of their keys", func() bool {
		all, err := w.Conn.Cmd.Keys(ctx, w.P.Base()+"*").Result()
		require.NoError(t, err)
		keys = keys[:0]
		for _, k := range all {
			if name := k[strings.LastIndexByte(k, ':')+1:]; strings.HasPrefix(name, "g") && strings.Trim(name[1:], "0123456789") == "" {
				keys = append(keys, k)
			}
		}
		return len(keys) == 0
	})
	// The id can be used again.
	w.Jobs("g0", "T", 2)
	require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, w.Counts("g0"))
}

func TestExpiresResultsBeforeGroups(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	ctx := t.Context()
	const n = 130
	end(w, n)
	<-time.After(20 * time.Millisecond)
	run(w, watcher.Config{Retention: watcher.Retention{Groups: time.Hour, Results: 10 * time.Millisecond}}, "w")
	w.Await("the end of the results", func() bool {
		for i := range n {
			if w.Conn.Cmd.Exists(ctx, w.P.Results(fmt.Sprint("g", i))).Val() > 0 {
				return false
			}
		}
		return true
	})
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, w.Counts("g7"))
	require.EqualValues(t, n, w.Conn.Cmd.ZCard(ctx, w.P.Ended()).Val())
}

func TestTrimsWhatIsPastItsRetention(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		long := time.Now().Add(-time.Hour)
		for _, stream := range []string{w.P.DeadLetters(), w.Space.Events(), w.Space.Rejected()} {
			for _, at := range []time.Time{long, time.Now()} {
				require.NoError(w.T, w.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: stream, ID: stagetest.EntryID(at), Values: []string{"type", "x", "data", `{"group":{}}`, "id", ""}}).Err())
			}
		}
		require.NoError(w.T, w.Conn.Cmd.ZAdd(ctx, w.P.Messages(),
			redis.Z{Score: float64(long.UnixMilli()), Member: "old"}, redis.Z{Score: float64(time.Now().UnixMilli()), Member: "new"}).Err())
		run(w, watcher.Config{Retention: watcher.Retention{MessageIDs: time.Minute, DeadLetters: time.Minute, Events: time.Minute}}, "w")
		for _, stream := range []string{w.P.DeadLetters(), w.Space.Events(), w.Space.Rejected()} {
			w.Await("the trimming of "+stream, func() bool { return w.Conn.Cmd.XLen(ctx, stream).Val() == 1 })
		}
		require.Equal(w.T, []string{"new"}, w.Conn.Cmd.ZRange(ctx, w.P.Messages(), 0, -1).Val())
	})
}

func TestWritesTheNumberOfPartitionsAgain(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	run(w, watcher.Config{NoProcessorTimeout: 10 * time.Millisecond}, "w")
	for range 2 {
		w.Await("the number of partitions", func() bool { return w.Conn.Cmd.Get(t.Context(), w.Space.PartitionCount()).Val() == "1" })
		require.NoError(t, w.Conn.Cmd.Del(t.Context(), w.Space.PartitionCount()).Err())
	}
}
