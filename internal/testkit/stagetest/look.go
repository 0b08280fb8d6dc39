package stagetest

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Group returns a group. The test fails if the group's counts do not agree with its jobs' states,
// unless the group is being swept.
func (w *World) Group(id string) api.Group {
	w.T.Helper()
	p := w.partition(id)
	// Read the hash and the states in one transaction, because other roles may change them
	// meanwhile.
	var hash *redis.MapStringStringCmd
	var states *redis.StringCmd
	_, err := w.Conn.Cmd.TxPipelined(w.ctx(), func(pipe redis.Pipeliner) error {
		hash, states = pipe.HGetAll(w.ctx(), p.Group(id)), pipe.Get(w.ctx(), p.States(id))
		return nil
	})
	if err != nil {
		require.ErrorIs(w.T, err, redis.Nil)
	}
	counted, found := map[string]int64{}, map[string]int64{}
	for _, field := range append(slices.Collect(maps.Values(countOf)), "accepted") {
		counted[field], _ = strconv.ParseInt(hash.Val()[field], 10, 64) // an absent count is 0
		found[field] = 0
	}
	found["accepted"] = int64(len(states.Val()) / 2)
	for i := 0; i < len(states.Val()); i += 2 {
		field, ok := countOf[ledger.Letter(states.Val()[i])]
		require.True(w.T, ok, "states of %s: %s", id, states.Val())
		found[field]++
	}
	if hash.Val()["sweep"] == "" { // while a cancelled group is swept, the counts are behind the states
		require.Equal(w.T, found, counted, "the ledger of %s and its states %s", id, states.Val())
	}
	g, err := w.Store.Group(w.ctx(), id)
	require.NoError(w.T, err)
	text, err := json.Marshal(counted)
	require.NoError(w.T, err)
	g.Counts = Decode[api.Counts](w.T, string(text))
	return g
}

// countOf maps each state letter to the count of the group's hash that counts jobs with this
// letter.
var countOf = map[ledger.Letter]string{
	ledger.Waiting:   "waiting",
	ledger.NonReady:  "non_ready",
	ledger.Ready:     "ready",
	ledger.InFlight:  "in_flight",
	ledger.Done:      "done",
	ledger.Reduced:   "done",
	ledger.Failed:    "failed",
	ledger.Cancelled: "cancelled",
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

// Results returns the results in the first partition's results stream, which are not reduced yet,
// in their order in the stream, without when and where their jobs ran.
func (w *World) Results() []api.Result {
	w.T.Helper()
	entries, err := w.Conn.Cmd.XRange(w.ctx(), w.P.ResultStream(), "-", "+").Result()
	require.NoError(w.T, err)
	var all []api.Result
	for _, e := range entries {
		for line := range strings.SplitSeq(e.Values["l"].(string), "\n") {
			r := Decode[api.Result](w.T, line)
			r.StartedMS, r.Worker = 0, ""
			all = append(all, r)
		}
	}
	return all
}

// DeadLetters returns up to 1,000 dead letters, the newest first.
func (w *World) DeadLetters() []api.DeadLetter {
	w.T.Helper()
	l, err := w.Store.DeadLetters(w.ctx(), messages.DeadLetterQuery{Limit: 1000})
	require.NoError(w.T, err)
	return l.DeadLetters
}

// Quarantined returns the list quarantine of the first partition: what was quarantined, newest
// first.
func (w *World) Quarantined() []string {
	w.T.Helper()
	list, err := w.Conn.Cmd.LRange(w.ctx(), w.P.Quarantine(), 0, -1).Result()
	require.NoError(w.T, err)
	return list
}

// EntryID returns the lowest id that a stream entry can have at this time. Ids of the same length
// compare like strings.
func EntryID(at time.Time) string { return strconv.FormatInt(at.UnixMilli(), 10) + "-0" }
