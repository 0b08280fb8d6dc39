package stagetest

import (
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Group returns a group. The test fails if the group's counts do not agree with its jobs' states,
// unless the group is being swept.
func (w *World) Group(id string) api.Group {
	w.T.Helper()
	p := w.partition(id)
	// Both are read in one step, because other roles may be running.
	var hash *redis.MapStringStringCmd
	var states *redis.StringCmd
	_, err := w.Conn.Cmd.TxPipelined(w.ctx(), func(pipe redis.Pipeliner) error {
		hash, states = pipe.HGetAll(w.ctx(), p.Group(id)), pipe.Get(w.ctx(), p.States(id))
		return nil
	})
	if err != nil {
		require.ErrorIs(w.T, err, redis.Nil)
	}
	var c struct {
		Accepted, Waiting, Ready, Done, Failed, Cancelled int64
		NonReady                                          int64 `redis:"non_ready"`
		InFlight                                          int64 `redis:"in_flight"`
	}
	fields := map[string]*int64{
		"accepted":  &c.Accepted,
		"waiting":   &c.Waiting,
		"non_ready": &c.NonReady,
		"ready":     &c.Ready,
		"in_flight": &c.InFlight,
		"done":      &c.Done,
		"failed":    &c.Failed,
		"cancelled": &c.Cancelled,
	}
	for field, to := range fields {
		if v := hash.Val()[field]; v != "" {
			*to = Decode[int64](w.T, v)
		}
	}
	letters := map[ledger.Letter]*int64{
		ledger.Waiting: new(int64), ledger.NonReady: new(int64), ledger.Ready: new(int64), ledger.InFlight: new(int64),
		ledger.Done: new(int64), ledger.Failed: new(int64), ledger.Cancelled: new(int64),
	}
	letters[ledger.Reduced] = letters[ledger.Done]
	for i := 0; i < len(states.Val()); i += 2 {
		n := letters[ledger.Letter(states.Val()[i])]
		require.NotNil(w.T, n, "states of %s: %s", id, states.Val())
		*n++
	}
	counts := api.Counts{
		Accepted: c.Accepted, Waiting: c.Waiting, NonReady: c.NonReady, Ready: c.Ready, InFlight: c.InFlight,
		Done: c.Done, Failed: c.Failed, Cancelled: c.Cancelled,
	}
	if hash.Val()["sweep"] == "" { // while a cancelled group is swept, the counts are behind the states
		require.Equal(w.T, api.Counts{
			Accepted:  int64(len(states.Val()) / 2),
			Waiting:   *letters[ledger.Waiting],
			NonReady:  *letters[ledger.NonReady],
			Ready:     *letters[ledger.Ready],
			InFlight:  *letters[ledger.InFlight],
			Done:      *letters[ledger.Done],
			Failed:    *letters[ledger.Failed],
			Cancelled: *letters[ledger.Cancelled],
		}, counts, "the ledger of %s and its states %s", id, states.Val())
	}
	g, err := w.Store.Group(w.ctx(), id)
	require.NoError(w.T, err)
	g.Counts = counts
	return g
}

func (w *World) partition(group string) keyspace.Partition {
	w.T.Helper()
	tenant, err := w.Conn.Cmd.Get(w.ctx(), w.Space.OfGroup(group).Owner(group)).Result()
	require.NoError(w.T, err)
	return w.Space.OfTenant(tenant)
}

// Counts returns a group's counts.
func (w *World) Counts(id string) api.Counts { w.T.Helper(); return w.Group(id).Counts }

// AwaitCounts waits until a group's counts are as wanted.
func (w *World) AwaitCounts(id string, want api.Counts) {
	w.T.Helper()
	var got api.Counts
	w.Await("counts of "+id, func() bool { got = w.Counts(id); return got == want })
	require.Equal(w.T, want, got)
}

// Job returns one job, as the API shows it.
func (w *World) Job(group string, ordinal int64) api.Job {
	w.T.Helper()
	j, err := w.Store.Job(w.ctx(), group, ordinal)
	require.NoError(w.T, err)
	return j
}

// Pending returns how many entries of a stream are delivered and not acknowledged.
func (w *World) Pending(stream, group string) int64 {
	w.T.Helper()
	p, err := w.Conn.Cmd.XPending(w.ctx(), stream, group).Result()
	require.NoError(w.T, err)
	return p.Count
}

// Results returns the results in the first partition's results stream, which are not reduced yet,
// in the order of the stream.
func (w *World) Results() []api.Result {
	w.T.Helper()
	entries, err := w.Conn.Cmd.XRange(w.ctx(), w.P.ResultStream(), "-", "+").Result()
	require.NoError(w.T, err)
	var all []api.Result
	for _, e := range entries {
		for line := range strings.SplitSeq(e.Values["l"].(string), "\n") {
			all = append(all, Decode[api.Result](w.T, line))
		}
	}
	return all
}

// DeadLetters returns up to 1,000 dead letters, the newest first.
func (w *World) DeadLetters() []api.DeadLetter {
	w.T.Helper()
	l, err := w.Store.DeadLetters(w.ctx(), "", 1000)
	require.NoError(w.T, err)
	return l.DeadLetters
}

// Quarantined returns the entries of the first partition that were quarantined, newest first.
func (w *World) Quarantined() []string {
	w.T.Helper()
	list, err := w.Conn.Cmd.LRange(w.ctx(), w.P.Quarantine(), 0, -1).Result()
	require.NoError(w.T, err)
	return list
}

// EntryID returns the lowest id that a stream entry can have at this time. Ids of the same length
// compare like strings.
func EntryID(at time.Time) string { return strconv.FormatInt(at.UnixMilli(), 10) + "-0" }
