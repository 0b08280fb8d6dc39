package ingest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ingest"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// twoStreams returns a configuration with two further streams: a, of tenant acme, and g, of tenant
// globex.
func twoStreams() ingest.Config {
	return ingest.Config{Lease: stagetest.Patience, Streams: []ingest.Stream{{Name: "a", Tenant: "acme"}, {Name: "g", Tenant: "globex"}}}
}

// further returns the key of a further stream.
func further(w *stagetest.World, name string) string {
	return keyspace.IngestOf(w.Space.Prefix(), name)
}

// addTo adds a message to a stream under an entry id. more holds further fields and values.
func addTo(w *stagetest.World, stream, entry, typ, data string, more ...string) {
	w.T.Helper()
	require.NoError(w.T, w.Conn.Cmd.XAdd(context.WithoutCancel(w.T.Context()), &redis.XAddArgs{
		Stream: stream, ID: entry, Values: append([]string{"type", typ, "data", data}, more...),
	}).Err())
}

// awaitHandled waits until the ingest stream and the two further ones are empty.
func awaitHandled(w *stagetest.World) {
	w.T.Helper()
	ctx := context.WithoutCancel(w.T.Context())
	w.Await("empty streams", func() bool {
		left := int64(0)
		for _, stream := range []string{w.Space.Ingest(), further(w, "a"), further(w, "g")} {
			left += w.Conn.Cmd.XLen(ctx, stream).Val()
		}
		return left == 0
	})
}

// TestFurtherStreamsHaveOneTenant: the messages of a further stream belong to its tenant, whether
// they name it or not. Messages that name another tenant, or a group of another tenant, are
// rejected; such a group and an unknown group give the same reason.
func TestFurtherStreamsHaveOneTenant(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("of-acme", "T", 1)
		a, g := further(w, "a"), further(w, "g")
		addTo(w, a, "1000-1", "group.submit", `{"id":"named","tenant":"acme","type":"T","jobs":[{"payload":1}]}`)
		addTo(w, a, "1000-2", "group.submit", `{"id":"not-named","type":"T","jobs":[{"payload":1}]}`)
		addTo(w, g, "1000-1", "group.submit", `{"id":"own","type":"T","jobs":[{"payload":1}]}`)
		addTo(w, g, "1000-2", "group.submit", `{"id":"stolen","tenant":"acme","type":"T","jobs":[{"payload":1}]}`)
		// The entry ids say 1970, so that these messages are not retried until their group comes.
		addTo(w, g, "1000-3", "jobs.append", `{"group":"of-acme","jobs":[{"payload":2}]}`)
		addTo(w, g, "1000-4", "group.seal", `{"group":"of-acme"}`)
		addTo(w, g, "1000-5", "group.cancel", `{"group":"of-acme"}`)
		addTo(w, g, "1000-6", "group.cancel", `{"group":"unknown"}`)
		addTo(w, g, "1000-7", "group.submit", `{"id":"of-acme","type":"T","jobs":[{"payload":1}]}`)
		w.Run(newIngest(w, twoStreams()))
		awaitHandled(w)
		for id, tenant := range map[string]string{"named": "acme", "not-named": "acme", "own": "globex"} {
			require.Equal(w.T, tenant, w.Group(id).Tenant)
		}
		_, err := w.Store.Group(stagetest.Trusted(w.T), "stolen")
		require.ErrorIs(w.T, err, api.ErrNotFound)
		require.Equal(w.T, api.Counts{Accepted: 1, Waiting: 1}, w.Counts("of-acme"))
		require.NotEqual(w.T, api.StatusCancelled, w.Group("of-acme").Status)

		reasons := map[string]string{}
		for _, m := range waitForRejected(w, 6) {
			reason, ok := strings.CutPrefix(m.Values["reason"].(string), "stream "+g+": ")
			require.True(w.T, ok)
			reasons[m.Values["entry"].(string)] = reason
		}
		require.Equal(w.T, "tenant is not yours", reasons["1000-2"])
		for _, entry := range []string{"1000-3", "1000-4", "1000-5"} {
			require.Equal(w.T, strings.Replace(reasons["1000-6"], "unknown", "of-acme", 1), reasons[entry])
		}
		require.Contains(w.T, reasons["1000-7"], "this id is taken")
	})
}

// TestSameIDsInSeveralStreams: several streams may have entries with the same ids, and producers
// may choose the same message ids: a message is not mistaken for one of another stream. A repeated
// message of the same stream is stored once.
func TestSameIDsInSeveralStreams(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		for _, tenant := range []string{"acme", "globex"} {
			_, err := w.Store.Submit(stagetest.Trusted(w.T), &messages.SubmitGroup{ID: tenant, Tenant: tenant, Type: "T"}, groups.Origin{})
			require.NoError(w.T, err)
		}
		one := func(group string) string { return `{"group":"` + group + `","jobs":[{"payload":1}]}` }
		for stream, group := range map[string]string{w.Space.Ingest(): "acme", further(w, "a"): "acme", further(w, "g"): "globex"} {
			addTo(w, stream, "1000-1", "jobs.append", one(group))
			addTo(w, stream, "1000-2", "jobs.append", one(group), "id", "m1")
			addTo(w, stream, "1000-3", "jobs.append", one(group), "id", "m1") // repeated
			addTo(w, stream, "1000-4", "group.submit", `{"type":"T","seal":true,"jobs":[{"payload":1}]}`)
		}
		stop := w.Run(newIngest(w, twoStreams()))
		awaitHandled(w)
		require.Empty(w.T, waitForRejected(w, 0))
		require.EqualValues(w.T, 4, w.Counts("acme").Accepted)
		require.EqualValues(w.T, 2, w.Counts("globex").Accepted)
		for id, tenant := range map[string]string{"1000-4": "1000-4", "a-1000-4": "acme", "g-1000-4": "globex"} {
			require.Equal(w.T, tenant, w.Group(id).Tenant)
		}

		// An entry of a further stream comes a second time under its id, as after a process that
		// died before it acknowledged the entry.
		addTo(w, further(w, "a"), "1000-5", "jobs.append", one("acme"))
		awaitHandled(w)
		require.EqualValues(w.T, 5, w.Counts("acme").Accepted)
		stop()
		require.NoError(w.T, w.Conn.Cmd.Del(w.T.Context(), further(w, "a")).Err())
		addTo(w, further(w, "a"), "1000-5", "jobs.append", one("acme"))
		w.Run(newIngest(w, twoStreams()))
		awaitHandled(w)
		require.EqualValues(w.T, 5, w.Counts("acme").Accepted)
	})
}

// TestFurtherStreamsWaitWhileTheBacklogIsFull: while the backlog is full, MaxInFlight messages of
// the further stream of globex wait. Behind them, the cancellation of a group of globex is applied,
// and that of a group of acme is not.
func TestFurtherStreamsWaitWhileTheBacklogIsFull(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const limit, waiting = 10, 60
	w.Store = w.NewStore(groups.Config{MaxBacklog: limit})
	w.Submit(messages.SubmitGroup{ID: "of-acme", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(limit / 2)})
	w.Submit(messages.SubmitGroup{ID: "of-globex", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(limit / 2)})
	g := further(w, "g")
	for i := range waiting {
		addTo(w, g, "*", "group.submit", fmt.Sprintf(`{"id":"g%d","type":"T","seal":true,"jobs":[{"payload":1}]}`, i))
	}
	require.NoError(t, w.Conn.Cmd.XGroupCreate(t.Context(), g, keyspace.GroupIngest, "0").Err())
	cfg := twoStreams()
	cfg.MaxInFlight = 20 // of each stream
	w.Run(newIngest(w, cfg))
	w.Await("MaxInFlight messages to wait", func() bool { return w.Pending(g, keyspace.GroupIngest) == 20 })
	addTo(w, g, "*", "group.cancel", `{"group":"of-acme"}`)
	addTo(w, g, "*", "group.cancel", `{"group":"of-globex"}`)
	require.EqualValues(t, limit/2, w.Counts("of-globex").Accepted)
	w.AwaitCounts("of-globex", api.Counts{Accepted: limit / 2, Cancelled: limit / 2})
	require.Equal(t, api.Counts{Accepted: limit / 2, Waiting: limit / 2}, w.Counts("of-acme"))
	require.Empty(t, waitForRejected(w, 0))
}
