package ingest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ingest"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// newIngest returns an ingest with the settings cfg, or with default ones.
func newIngest(w *stagetest.World, cfg ...ingest.Config) *ingest.Ingest {
	w.T.Helper()
	c := ingest.Config{Lease: stagetest.Patience}
	if len(cfg) > 0 {
		c = cfg[0]
	}
	c.Grace = stagetest.Patience
	return ingest.New(stagetest.Process(w, "in"), c, w.Store, messages.Decoder{})
}

func startIngest(w *stagetest.World, lease time.Duration) {
	w.T.Helper()
	w.Run(newIngest(w, ingest.Config{Lease: lease}))
}

// addEntry adds a message to the ingest stream. more holds further fields and values.
func addEntry(w *stagetest.World, typ, data string, more ...string) (entry string) {
	w.T.Helper()
	id, err := w.Conn.Cmd.XAdd(context.WithoutCancel(w.T.Context()), &redis.XAddArgs{
		Stream: w.Space.Ingest(), Values: append([]string{"type", typ, "data", data}, more...)}).Result()
	require.NoError(w.T, err)
	return id
}

// awaitGroup waits until a group exists and ok accepts it.
func awaitGroup(w *stagetest.World, id string, ok func(api.Group) bool) {
	w.T.Helper()
	w.Await("group "+id, func() bool {
		g, err := w.Store.Group(auth.Trust(context.WithoutCancel(w.T.Context())), id)
		return err == nil && ok(g)
	})
}

// waitForRejected waits until the stream ingest:rejected has n entries, and returns them.
func waitForRejected(w *stagetest.World, n int) []redis.XMessage {
	w.T.Helper()
	var all []redis.XMessage
	w.Await("rejected entries", func() bool {
		var err error
		all, err = w.Conn.Cmd.XRange(context.WithoutCancel(w.T.Context()), w.Space.Rejected(), "-", "+").Result()
		require.NoError(w.T, err)
		return len(all) >= n
	})
	require.Len(w.T, all, n)
	return all
}

func awaitEmptyStream(w *stagetest.World) {
	w.T.Helper()
	w.Await("empty stream", func() bool {
		return w.Conn.Cmd.XLen(context.WithoutCancel(w.T.Context()), w.Space.Ingest()).Val() == 0
	})
}

func TestMessagesOfTheStreamAreHandled(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		// The messages of a group come in any order.
		addEntry(w, "group.seal", `{"group":"g","total":5}`)
		addEntry(w, "jobs.append", `{"group":"g","jobs":[{"payload":1},{"payload":2}]}`, "id", "m1")
		addEntry(w, "jobs.append", `{"group":"g","jobs":[{"payload":1},{"payload":2}]}`, "id", "m1") // repeated
		addEntry(w, "group.submit", `{"id":"g","tenant":"acme","type":"T","jobs":[{"payload":3},{"payload":4},{"payload":5}]}`)
		unnamed := addEntry(w, "group.submit", `{"type":"T","seal":true,"jobs":[{"payload":1}]}`)
		addEntry(w, "group.submit", `{"id":"c","type":"T","jobs":[{"payload":1}]}`)
		startIngest(w, stagetest.Patience)
		awaitGroup(w, "g", func(g api.Group) bool { return g.Sealed })
		require.Equal(w.T, api.Counts{Accepted: 5, Waiting: 5}, w.Counts("g"))
		awaitGroup(w, unnamed, func(g api.Group) bool { return g.Sealed && g.Counts.Waiting == 1 })
		// Wait until the job is stored: messages are handled at the same time, and a group that is
		// cancelled first would refuse the job.
		awaitGroup(w, "c", func(g api.Group) bool { return g.Counts.Waiting == 1 })
		addEntry(w, "group.cancel", `{"group":"c"}`)
		awaitGroup(w, "c", func(g api.Group) bool { return g.Counts.Cancelled == 1 })
		awaitEmptyStream(w)
		require.Empty(w.T, waitForRejected(w, 0))
	})
}

// TestInvalidMessagesAreRejected: a message that can't be accepted is quarantined with the reason.
// It does not stop other messages.
func TestInvalidMessagesAreRejected(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		addEntry(w, "group.submit", `{"type":`)
		addEntry(w, "no.such", `{}`)
		addEntry(w, "group.submit", `{"type":"T","tenant":"{0}"}`)
		addEntry(w, "group.submit", `{"id":"g","type":"T","seal":true,"jobs":[{"payload":1}]}`)
		startIngest(w, stagetest.Patience)
		awaitGroup(w, "g", func(g api.Group) bool { return g.Sealed })
		addEntry(w, "group.submit", `{"id":"g","type":"OTHER"}`)
		addEntry(w, "jobs.append", `{"group":"g","jobs":[{"payload":1}]}`)
		awaitEmptyStream(w)
		var reasons []string
		for _, m := range waitForRejected(w, 5) {
			require.NotEmpty(w.T, m.Values["entry"])
			require.NotEmpty(w.T, m.Values["at"])
			require.NotEmpty(w.T, m.Values["type"])
			require.NotEmpty(w.T, m.Values["data"])
			reasons = append(reasons, m.Values["reason"].(string))
		}
		all := strings.Join(reasons, "\n")
		for _, want := range []string{"must be one of group.submit", "valid JSON", "tenant", "another group has this id", "takes no more jobs"} {
			require.Contains(w.T, all, want)
		}
		require.Equal(w.T, api.Counts{Accepted: 1, Waiting: 1}, w.Counts("g"))
	})
}

// TestTagsOfMessages: a message of the stream may have tags. One with bad tags, or with one more than the
// tenant may have, is rejected with the field and the limit.
func TestTagsOfMessages(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx, known := context.WithoutCancel(w.T.Context()), make([]any, 999)
		for i := range known {
			known[i] = fmt.Sprint("n=", i)
		}
		require.NoError(w.T, w.Conn.Cmd.SAdd(ctx, w.Space.OfTenant("acme").Tags("acme"), known...).Err())
		addEntry(w, "group.submit", `{"id":"g","tenant":"acme","type":"T","tags":{"a":"1"}}`)
		startIngest(w, stagetest.Patience)
		awaitGroup(w, "g", func(g api.Group) bool { return g.Tags["a"] == "1" })
		addEntry(w, "group.submit", `{"id":"more","tenant":"acme","type":"T","tags":{"a":"2"}}`)
		addEntry(w, "group.submit", `{"id":"long","tenant":"acme","type":"T","tags":{"a":"`+strings.Repeat("x", 129)+`"}}`)
		addEntry(w, "group.submit", `{"id":"again","tenant":"acme","type":"T","tags":{"a":"1"}}`)
		awaitGroup(w, "again", func(g api.Group) bool { return g.Tags["a"] == "1" })
		var reasons []string
		for _, m := range waitForRejected(w, 2) {
			reasons = append(reasons, m.Values["reason"].(string))
		}
		all := strings.Join(reasons, "\n")
		require.Contains(w.T, all, "group more: tags: the groups of a tenant may have at most 1000 different tags")
		require.Contains(w.T, all, "tags.a: must be KEY=VALUE")
	})
}

// TestMessagesThatNobodyOwnsAreHandled: XGROUP SETID follows each of ten appends at once, so that
// they are in no pending list. They are stored all the same, and before a later seal takes effect.
func TestMessagesThatNobodyOwnsAreHandled(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	addEntry(w, "group.submit", `{"id":"g","type":"T","jobs":[{"payload":0}]}`)
	startIngest(w, 500*time.Millisecond)
	awaitGroup(w, "g", func(api.Group) bool { return true })
	for i := range 10 {
		_, err := w.Conn.Cmd.TxPipelined(t.Context(), func(tx redis.Pipeliner) error {
			tx.XAdd(t.Context(), &redis.XAddArgs{Stream: w.Space.Ingest(), Values: []string{
				"type", "jobs.append", "data", fmt.Sprintf(`{"group":"g","jobs":[{"payload":%d}]}`, i)}})
			tx.XGroupSetID(t.Context(), w.Space.Ingest(), keyspace.GroupIngest, "$")
			return nil
		})
		require.NoError(t, err)
	}
	addEntry(w, "group.seal", `{"group":"g"}`)
	awaitGroup(w, "g", func(g api.Group) bool { return g.Sealed })
	require.Equal(t, api.Counts{Accepted: 11, Waiting: 11}, w.Counts("g"))
	awaitEmptyStream(w)
	require.Empty(t, waitForRejected(w, 0))

	// Going back delivers messages twice: each counts once.
	addEntry(w, "group.submit", `{"id":"h","type":"T","seal":true,"jobs":[{"payload":0}]}`)
	require.NoError(t, w.Conn.Cmd.XGroupSetID(t.Context(), w.Space.Ingest(), keyspace.GroupIngest, "0").Err())
	awaitGroup(w, "h", func(g api.Group) bool { return g.Sealed })
	awaitEmptyStream(w)
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts("h"))
}

// TestMessageWithTheLargestID: after a message with the largest possible id, Redis accepts no more.
// That message is stored once, and the stream then takes messages again.
func TestMessageWithTheLargestID(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	startIngest(w, stagetest.Patience)
	for i := range 3 {
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: w.Space.Ingest(), ID: "18446744073709551615-18446744073709551615",
			Values: []string{"type", "group.submit", "data", fmt.Sprintf(`{"tenant":"t%d","type":"T","seal":true,"jobs":[{"payload":1}]}`, i)},
		}).Err())
		w.Await("the stream to take messages", func() bool {
			return w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.Space.Ingest(), Values: []string{
				"type", "group.submit", "data", fmt.Sprintf(`{"id":"g%d","type":"T","seal":true}`, i)}}).Err() == nil
		})
		awaitGroup(w, fmt.Sprint("g", i), func(g api.Group) bool { return g.Sealed })
		awaitEmptyStream(w)
	}
	groups, err := w.Conn.Cmd.ZRange(t.Context(), w.P.Groups(), 0, -1).Result()
	require.NoError(t, err)
	require.Len(t, groups, 6)
	require.Empty(t, waitForRejected(w, 0))
}

// TestSealWaitsForOlderEntries: a seal without a total takes effect only after an older append,
// which a dead process has read, is stored.
func TestSealWaitsForOlderEntries(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := t.Context()
	_, err := w.Store.Submit(auth.Trust(ctx), &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T"}, groups.Origin{At: time.Now()})
	require.NoError(t, err)
	addEntry(w, "jobs.append", `{"group":"g","jobs":[{"payload":1},{"payload":2}]}`)
	require.NoError(t, w.Conn.Cmd.XGroupCreate(ctx, w.Space.Ingest(), keyspace.GroupIngest, "0").Err())
	require.NoError(t, w.Conn.Cmd.XReadGroup(ctx, &redis.XReadGroupArgs{Group: keyspace.GroupIngest, Consumer: "dead", Streams: []string{w.Space.Ingest(), ">"}}).Err())
	addEntry(w, "group.seal", `{"group":"g"}`)
	startIngest(w, 500*time.Millisecond) // after this time it takes over the dead process's entry
	awaitGroup(w, "g", func(g api.Group) bool { return g.Sealed })
	require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, w.Counts("g"))
	awaitEmptyStream(w)
	require.Empty(t, waitForRejected(w, 0))
}

// TestMessageIsRetriedAfterARedisError: a message that fails by an error of Redis is retried,
// because the cause may be repaired.
func TestMessageIsRetriedAfterARedisError(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := t.Context()
	require.NoError(t, w.Conn.Cmd.Set(ctx, w.P.Group("g"), "of the wrong type", 0).Err())
	addEntry(w, "group.submit", `{"id":"g","tenant":"acme","type":"T","jobs":[{"payload":1}]}`)
	addEntry(w, "group.submit", `{"id":"h","tenant":"acme","type":"T","jobs":[{"payload":1}]}`)
	startIngest(w, stagetest.Patience)
	awaitGroup(w, "h", func(g api.Group) bool { return g.Counts.Waiting == 1 }) // other messages are handled
	w.Await("one entry to be left", func() bool { return w.Conn.Cmd.XLen(ctx, w.Space.Ingest()).Val() == 1 })
	require.NoError(t, w.Conn.Cmd.Del(ctx, w.P.Group("g")).Err())
	awaitGroup(w, "g", func(g api.Group) bool { return g.Counts.Waiting == 1 })
	awaitEmptyStream(w)
	require.Empty(t, waitForRejected(w, 0))
}

// TestTwoProcessesHandleEachMessageOnce: two processes share the stream: each of 300 submissions is
// stored once.
func TestTwoProcessesHandleEachMessageOnce(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 300
	for range 2 {
		startIngest(w, stagetest.Patience)
	}
	for i := range n {
		addEntry(w, "group.submit", fmt.Sprintf(`{"id":"g%d","tenant":"acme","type":"T","seal":true,"jobs":[{"payload":1}]}`, i))
	}
	awaitEmptyStream(w)
	for i := range n {
		require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts(fmt.Sprint("g", i)))
	}
}

// TestMessagesWaitWhileTheBacklogIsFull: while the backlog is full, messages wait: they are neither
// rejected nor stored beyond the limit, and they don't delay a cancellation that is behind them.
func TestMessagesWaitWhileTheBacklogIsFull(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := t.Context()
	const limit, waiting = 10, 300
	w.Store = w.NewStore(groups.Config{MaxBacklog: limit})
	w.Submit(messages.SubmitGroup{ID: "full", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(limit)})
	for i := range waiting {
		addEntry(w, "group.submit", fmt.Sprintf(`{"id":"g%d","tenant":"acme","type":"T","seal":true,"jobs":[{"payload":1}]}`, i))
	}
	require.NoError(t, w.Conn.Cmd.XGroupCreate(ctx, w.Space.Ingest(), keyspace.GroupIngest, "0").Err())
	w.Run(newIngest(w, ingest.Config{Lease: stagetest.Patience, MaxInFlight: 100}))
	w.Await("MaxInFlight messages to wait", func() bool { return w.Pending(w.Space.Ingest(), keyspace.GroupIngest) == 100 })
	addEntry(w, "group.cancel", `{"group":"full"}`)
	addEntry(w, "group.cancel", `{"group":`) // an invalid cancellation must not stop the search
	require.EqualValues(t, limit, w.Counts("full").Accepted)
	w.AwaitCounts("full", api.Counts{Accepted: limit, Cancelled: limit})

	// The backlog has space now, for exactly limit jobs.
	stored := func() (n int) {
		list, err := w.Store.Groups(auth.Trust(ctx), messages.ListQuery{Limit: 500})
		require.NoError(t, err)
		for _, g := range list.Groups {
			n += int(g.Counts.Waiting)
		}
		return n
	}
	w.Await("limit jobs to be stored", func() bool {
		n := stored()
		require.LessOrEqual(t, n, limit)
		return n == limit
	})
	require.Empty(t, waitForRejected(w, 0))
	require.GreaterOrEqual(t, w.Conn.Cmd.XLen(ctx, w.Space.Ingest()).Val(), int64(waiting-limit))
}

// TestSubmissionBehindLargeAppendsIsRead: many large messages wait for their group. The group's
// submission, which is behind them, is still read.
func TestSubmissionBehindLargeAppendsIsRead(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const appends, size = 12, 1 << 20 // more bytes than the handlers of a process may have at once
	job := `{"payload":"` + strings.Repeat("x", size/16) + `"}`
	for range appends {
		addEntry(w, "jobs.append", `{"group":"g","jobs":[`+strings.Repeat(job+",", 15)+job+`]}`)
	}
	addEntry(w, "group.submit", `{"id":"g","tenant":"acme","type":"T"}`)
	startIngest(w, stagetest.Patience)
	awaitGroup(w, "g", func(g api.Group) bool { return g.Counts.Waiting == 16*appends })
	awaitEmptyStream(w)
	require.Empty(t, waitForRejected(w, 0))
}

// TestStatusIsPublished: an ingest process publishes its status while it runs, because the
// admission controllers divide the free backlog by the number of live ingest processes.
func TestStatusIsPublished(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	stop := w.Run(newIngest(w))
	shown := func() []api.StageStatus {
		all, err := presence.Stages(t.Context(), w.Conn, w.Space)
		require.NoError(t, err)
		return all
	}
	w.Await("the published status", func() bool { s := shown(); return len(s) == 1 && s[0].Role == "ingest" && s[0].Running })
	stop()
	require.Empty(t, shown())
}

// BenchmarkStream measures how fast one ingest process stores the messages that wait in the ingest
// stream.
func BenchmarkStream(b *testing.B) {
	const groups = 20
	many := strings.Repeat(`{"payload":{"to":"a@example.com"}},`, 499)
	for name, bench := range map[string]struct {
		entries, jobs int
		typ, data     string // data has verbs for the round, the group's number and the message's number
	}{
		"small appends": {20_000, 1, messages.TypeJobsAppend, `{"group":"g%d-%d","jobs":[{"payload":%d}]}`},
		"large appends": {400, 500, messages.TypeJobsAppend, `{"group":"g%d-%d","jobs":[` + many + `{"payload":%d}]}`},
		"submissions":   {5_000, 1, messages.TypeGroupSubmit, `{"id":"s%[1]d-%[3]d","tenant":"t%[2]d","type":"T","seal":true,"jobs":[{"payload":1}]}`},
	} {
		b.Run(name, func(b *testing.B) {
			w := stagetest.New(b, redistest.Server(b).URL(), "b:", 1)
			ctx, round := b.Context(), 0
			for b.Loop() {
				b.StopTimer()
				for g := range groups {
					w.Submit(messages.SubmitGroup{ID: fmt.Sprintf("g%d-%d", round, g), Tenant: fmt.Sprint("t", g), Type: "T"})
				}
				pipe := w.Conn.Cmd.Pipeline()
				for i := range bench.entries {
					pipe.XAdd(ctx, &redis.XAddArgs{Stream: w.Space.Ingest(), Values: []string{"type", bench.typ, "data", fmt.Sprintf(bench.data, round, i%groups, i)}})
				}
				_, err := pipe.Exec(ctx)
				require.NoError(b, err)
				b.StartTimer()
				stop := w.Run(newIngest(w))
				require.Eventually(b, func() bool { return w.Conn.Cmd.XLen(ctx, w.Space.Ingest()).Val() == 0 }, stagetest.Patience, time.Millisecond)
				b.StopTimer()
				stop()
				require.NoError(b, w.Conn.Cmd.FlushAll(ctx).Err())
				round++
				b.StartTimer()
			}
			b.ReportMetric(float64(b.N*bench.entries*bench.jobs)/b.Elapsed().Seconds(), "jobs/s")
			b.ReportAllocs()
		})
	}
}
