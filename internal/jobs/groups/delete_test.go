package groups_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// keysWith returns the keys of Redis whose name or content has a text.
func keysWith(t *testing.T, w *stagetest.World, text string) (found []string) {
	t.Helper()
	ctx, c := context.WithoutCancel(t.Context()), w.Conn.Cmd
	for keys := c.Scan(ctx, 0, w.Space.Prefix()+"*", 1000).Iterator(); keys.Next(ctx); {
		key := keys.Val()
		kind, err := c.Type(ctx, key).Result()
		require.NoError(t, err)
		var content any
		switch kind {
		case "string":
			content, err = c.Get(ctx, key).Result()
		case "hash":
			content, err = c.HGetAll(ctx, key).Result()
		case "list":
			content, err = c.LRange(ctx, key, 0, -1).Result()
		case "set":
			content, err = c.SMembers(ctx, key).Result()
		case "zset":
			content, err = c.ZRange(ctx, key, 0, -1).Result()
		case "stream":
			content, err = c.XRange(ctx, key, "-", "+").Result()
		}
		require.NoError(t, err)
		if strings.Contains(key+fmt.Sprint(content), text) {
			found = append(found, key)
		}
	}
	return found
}

func requireClean(t *testing.T, w *stagetest.World) {
	t.Helper()
	report, err := audit.Run(context.WithoutCancel(t.Context()), w.Conn, w.Space, audit.Options{})
	require.NoError(t, err)
	require.Empty(t, report.Violations)
}

func withKeys(group, tenant string, n int) messages.SubmitGroup {
	g := messages.SubmitGroup{ID: group, Tenant: tenant, Type: "T", UniqueKeys: true}
	for i := range n {
		g.Jobs = append(g.Jobs, messages.Job{Key: fmt.Sprintf("%s-key-%d", group, i), Payload: fmt.Appendf(nil, `"%s-payload-%d"`, group, i)})
	}
	later := time.Now().Add(time.Hour)
	g.Jobs[n-1].RunAt = &later
	g.Jobs[0].Payload = fmt.Appendf(nil, `"%s-payload-0%s"`, group, strings.Repeat("x", 5000)) // stored separately
	return g
}

// TestDeleteGroup: of a deleted group nothing is left in Redis, whatever states its jobs had, what a
// worker reports of its running jobs is stale, and others lose nothing.
func TestDeleteGroup(t *testing.T) {
	for name, play := range map[string]func(w *stagetest.World) (held []stagetest.Held){
		"waiting": func(*stagetest.World) []stagetest.Held { return nil },
		"every state": func(w *stagetest.World) []stagetest.Held {
			w.Admit("T")
			jobs := w.Take("T", "w-1", 9)
			w.Done(`"doomed-data"`, jobs[0], jobs[1])
			w.Reduce()
			w.Done(`"doomed-data"`, jobs[2])
			w.Fail("doomed-code", jobs[3])
			return jobs[5:7]
		},
		"ended": func(w *stagetest.World) []stagetest.Held {
			w.Admit("T")
			jobs := w.Take("T", "w-1", 11)
			w.Done(`"doomed-data"`, jobs[2:]...)
			w.Fail("doomed-code", jobs[0], jobs[1])
			w.Reduce()
			_, err := w.Store.CancelJob(stagetest.Trusted(w.T), "doomed", 11)
			require.NoError(w.T, err)
			_, err = ledger.Advance(stagetest.Trusted(w.T), w.Conn.Cmd, w.P, "doomed")
			require.NoError(w.T, err)
			require.Equal(w.T, api.StatusCompleted, w.Group("doomed").Status)
			return nil
		},
		"scheduled": func(w *stagetest.World) []stagetest.Held {
			later := time.Now().Add(time.Hour)
			g := withKeys("doomed-later", "acme", 3)
			g.RunAt = &later
			w.Submit(g)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			ctx := stagetest.Trusted(t)
			limit := int64(50)
			require.NoError(t, ledger.SetTenant(ctx, w.Conn.Cmd, w.P, "acme", ledger.TenantSettings{InFlight: &limit}))
			w.Submit(withKeys("doomed", "acme", 12))
			held := play(w)
			w.Submit(withKeys("other", "acme", 3))
			_, _, err := ledger.AddCallbacks(ctx, w.Conn.Cmd, w.P, []ledger.NewCallback{{
				ID: ledger.EventID("doomed", "1", api.StatusCancelled), Queue: "acme", Tenant: "acme", Group: "doomed",
				Type: "group.cancelled", At: time.Now(), Body: []byte(`"doomed"`),
			}})
			require.NoError(t, err)
			for id, payload := range map[string]string{
				ledger.EventID("doomed", "1", api.StatusRunning): `{"group":{"id":"doomed"}}`,
				"audit.1": `{"group":{"id":"doomed"},"law":"registry"}`,
			} {
				fields, err := stream.Marshaller{}.Marshal(w.Space.Events(), wm.NewMessage(id, "group.running", []byte(payload)))
				require.NoError(t, err)
				require.NoError(t, w.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: w.Space.Events(), Values: fields}).Err())
			}
			require.NotEmpty(t, keysWith(t, w, "doomed"))

			for _, id := range []string{"doomed", "doomed-later"} {
				d, err := w.Store.Delete(ctx, id)
				if id == "doomed" || name == "scheduled" {
					require.NoError(t, err)
					require.Equal(t, api.Deletion{ID: id, Deleted: true}, d)
				}
				_, err = w.Store.Delete(ctx, id)
				require.ErrorIs(t, err, api.ErrNotFound)
			}
			require.Empty(t, keysWith(t, w, "doomed"))
			if len(held) > 0 {
				r, err := ledger.Outcome(ctx, w.Conn.Cmd, w.P, "T", ledger.Congestion{}, []ledger.GroupOutcome{{
					Group: "doomed", Done: []ledger.DoneJob{{Entry: held[0].Entry, Ordinal: held[0].Ordinal, Attempt: held[0].Attempt, Line: []byte(`{"ordinal":5}`)}},
				}})
				require.NoError(t, err)
				require.Zero(t, r.Owned, "the outcome of a running job is stale")
			}
			requireClean(t, w)
			require.Empty(t, keysWith(t, w, "doomed"))
			w.Finish("T")
			require.EqualValues(t, 2, w.Counts("other").Done)
			w.Submit(withKeys("doomed", "acme", 2)) // the id is free
			requireClean(t, w)
		})
	}
}

// TestEraseKey: of the jobs with a key nothing but states and counts is left in Redis, in all groups of
// the tenant, and the other jobs keep what they have.
func TestEraseKey(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	const bob = "bob@example.com"
	group := func(id, tenant string, unique bool, n int) messages.SubmitGroup {
		g := messages.SubmitGroup{ID: id, Tenant: tenant, Type: "T", UniqueKeys: unique}
		for i := range n {
			g.Jobs = append(g.Jobs, messages.Job{Key: fmt.Sprintf("k%d", i), Payload: fmt.Appendf(nil, `{"to":"k%d"}`, i)})
		}
		g.Jobs[1] = messages.Job{Key: bob, Payload: []byte(`{"to":"bob@example.com"}`)}
		return g
	}
	large := group("failed", "acme", true, 3)
	large.Jobs[1].Payload = fmt.Appendf(nil, `{"to":"bob@example.com","x":"%s"}`, strings.Repeat("x", 5000))
	w.Submit(large)
	w.Admit("T")
	w.Fail("BOUNCED", w.Take("T", "w-1", 3)...)
	w.Submit(group("failed-without-index", "acme", false, 3))
	w.Admit("T")
	w.Fail("BOUNCED", w.Take("T", "w-1", 3)...)
	w.Submit(group("done", "acme", true, 3))
	w.Admit("T")
	bobs := w.Take("T", "w-1", 3)[1]
	_, err := ledger.Outcome(ctx, w.Conn.Cmd, w.P, "T", ledger.Congestion{}, []ledger.GroupOutcome{{
		Group: "done", Done: []ledger.DoneJob{{Entry: bobs.Entry, Ordinal: bobs.Ordinal, Attempt: bobs.Attempt, Line: []byte(
			`{"ordinal":1,"key":"bob@example.com","attempts":1,"last_error":{"error":"bob@example.com is busy"},"data":"bob@example.com"}`,
		)}},
	}})
	require.NoError(t, err)
	w.Reduce()
	w.Submit(group("globex", "globex", true, 3))
	w.Submit(group("waits", "acme", true, 3))
	w.Submit(group("waits-without-index", "acme", false, 3))
	cancelled := group("cancelled", "acme", true, 3)
	cancelled.Type = "V"
	w.Submit(cancelled)
	w.Admit("V")
	_, err = w.Store.Cancel(ctx, "cancelled")
	require.NoError(t, err)
	running := group("running", "acme", true, 3)
	running.Type = "U"
	w.Submit(running)
	w.Admit("U")
	held := w.Take("U", "w-1", 3)

	e, err := w.Store.Erase(ctx, "acme", bob, "")
	require.NoError(t, err)
	one := int64(1)
	require.Equal(t, 7, e.Groups)
	require.Equal(t, 4, e.Erased)
	require.ElementsMatch(t, []api.ErasureLeft{
		{Group: "running", Ordinal: &one, Reason: api.LeftRunning}, {Group: "cancelled", Ordinal: &one, Reason: api.LeftRunning},
		{Group: "waits-without-index", Reason: api.LeftNoIndex},
	}, e.Left)
	requireClean(t, w)
	w.Done(`"bob@example.com"`, held[1])
	w.Done("null", held[0], held[2])
	w.Reduce()
	ids, err := w.Conn.Cmd.XRange(ctx, w.P.Ready("V"), "-", "+").Result()
	require.NoError(t, err)
	for _, e := range ids { // as a worker removes them
		require.NoError(t, w.Conn.Cmd.XDel(ctx, w.P.Ready("V"), e.ID).Err())
	}
	_, err = w.Store.Delete(ctx, "waits-without-index")
	require.NoError(t, err)
	_, err = w.Store.Delete(ctx, "globex")
	require.NoError(t, err)
	e, err = w.Store.Erase(ctx, "acme", bob, "")
	require.NoError(t, err)
	require.Empty(t, e.Left)
	require.Empty(t, keysWith(t, w, bob))
	requireClean(t, w)

	st := w.Job("failed", 1)
	require.Equal(t, "failed", st.State)
	require.Empty(t, st.Key)
	require.Equal(t, "erased", st.LastError.Error)
	require.Equal(t, "cancelled", w.Job("waits", 1).State)
	require.NotEmpty(t, keysWith(t, w, `{"to":"k2"}`), "others keep their payloads")
	_, err = ledger.Advance(ctx, w.Conn.Cmd, w.P, "failed")
	require.NoError(t, err)
	_, err = w.Store.Retry(ctx, "failed", api.RetryChoice{})
	require.NoError(t, err)
	_, err = ledger.Requeue(ctx, w.Conn.Cmd, w.P, "failed")
	require.NoError(t, err, "a retry of an erased job")
	requireClean(t, w)
	_, err = w.Store.Erase(ctx, "acme", bob, "nonsense")
	require.ErrorContains(t, err, "cursor")
	_, err = w.Store.Erase(ctx, "nobody", bob, "")
	require.ErrorIs(t, err, api.ErrNotFound)
}

// TestDeleteAgain: a deletion that was cut off anywhere is completed by the next one, and leaves no
// owner key.
func TestDeleteAgain(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	ctx := stagetest.Trusted(t)
	for i := range 50 {
		id := fmt.Sprint("kill", i)
		w.Submit(withKeys(id, "acme", 12))
		cut, cancel := context.WithTimeout(ctx, time.Duration(i)*100*time.Microsecond)
		_, _ = w.Store.Delete(cut, id)
		cancel()
		if _, err := w.Store.Delete(ctx, id); err != nil {
			require.ErrorIs(t, err, api.ErrNotFound)
		}
	}
	require.Empty(t, keysWith(t, w, "kill"))
	requireClean(t, w)
}

// TestDeleteLeavesTheIDOfAnother: a deletion that comes late does not free an id that another tenant has.
func TestDeleteLeavesTheIDOfAnother(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	ctx := stagetest.Trusted(t)
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(1)})
	require.NoError(t, ledger.ReleaseID(ctx, w.Conn.Cmd, w.Space, w.Space.OfTenant("acme"), "g", "acme"))
	require.EqualValues(t, 1, w.Counts("g").Accepted)
}

// TestAppendAfterDelete: a request that was applied to a deleted group is a new one for the next group
// with the same id.
func TestAppendAfterDelete(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	for range 2 {
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T"}, groups.Origin{At: time.Now()})
		require.NoError(t, err)
		for range 2 { // the second time changes nothing
			err = w.Store.Append(ctx, "g", stagetest.Numbered(3), "request", groups.Origin{At: time.Now()})
			require.NoError(t, err)
		}
		require.EqualValues(t, 3, w.Counts("g").Accepted)
		_, err = w.Store.Delete(ctx, "g")
		require.NoError(t, err)
		time.Sleep(2 * time.Millisecond)
	}
}
