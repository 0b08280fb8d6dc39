package ledger_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// number parses a number of a Redis reply; a value that is missing or no integer is 0.
func number(v any) int64 {
	s, _ := v.(string)
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}

// places are the fields of a group's hash that count its jobs in each state, by state letter.
var places = map[ledger.Letter]string{
	ledger.Waiting: "waiting", ledger.NonReady: "non_ready", ledger.Ready: "ready", ledger.InFlight: "in_flight",
	ledger.Done: "done", ledger.Reduced: "done", ledger.Failed: "failed", ledger.Cancelled: "cancelled",
}

// letters returns the state letters of a group's jobs, without the attempt marks.
func letters(states string) string {
	b := make([]byte, len(states)/2)
	for i := range b {
		b[i] = states[2*i]
	}
	return string(b)
}

func (w *world) states(group string) string {
	w.Helper()
	s, err := w.c.Get(w.Context(), w.p.States(group)).Result()
	if !errors.Is(err, redis.Nil) {
		require.NoError(w, err)
	}
	return letters(s)
}

// ledger returns a group's counts that are not 0, by state. Like balance, it checks that they agree
// with the states.
func (w *world) ledger(group string) map[string]int64 {
	w.Helper()
	h, err := w.c.HGetAll(w.Context(), w.p.Group(group)).Result()
	require.NoError(w, err)
	return w.balance(h, w.states(group))
}

// balance returns the counts in a group's hash that are not 0. It checks that they agree with the
// states, that accepted is their sum, and that reduced counts the reduced jobs.
func (w *world) balance(h map[string]string, states string) map[string]int64 {
	w.Helper()
	counts, count, sum := map[string]int64{}, map[string]int64{}, int64(0)
	for _, letter := range []byte(states) {
		count[places[ledger.Letter(letter)]]++
	}
	for _, field := range slices.Compact(slices.Sorted(maps.Values(places))) {
		if n := number(h[field]); n != 0 {
			counts[field] = n
			sum += n
		}
	}
	require.Equal(w, count, counts, "ledger of %s against its states %s", h["id"], states)
	require.Equal(w, number(h["accepted"]), sum, "accepted jobs of %s", h["id"])
	require.Equal(w, int64(strings.Count(states, string(ledger.Reduced))), number(h["reduced"]), "reduced jobs of %s", h["id"])
	return counts
}

// dump returns the partition's data for comparisons: for each key its Redis type and content, with
// the consumers' pending entries, but without the counters stale and lost.
func (w *world) dump() map[string]string {
	w.Helper()
	all := map[string]string{}
	for _, key := range w.keys() {
		all[strings.TrimPrefix(key, w.p.Base())] = w.content(key)
	}
	return all
}

func (w *world) keys() []string {
	w.Helper()
	var keys []string
	for it := w.c.Scan(w.Context(), 0, w.p.Base()+"*", 1000).Iterator(); it.Next(w.Context()); {
		keys = append(keys, it.Val())
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

func (w *world) content(key string) string {
	w.Helper()
	ctx, what := w.Context(), w.c.Type(w.Context(), key).Val()
	var v any
	var err error
	switch what {
	case "string":
		v, err = w.c.Get(ctx, key).Result()
	case "hash":
		var h map[string]string
		h, err = w.c.HGetAll(ctx, key).Result()
		delete(h, "stale") // this counter counts reports that change nothing
		delete(h, "lost")
		v = h // fmt prints the keys of a map sorted
	case "list":
		v, err = w.c.LRange(ctx, key, 0, -1).Result()
	case "set":
		var s []string
		s, err = w.c.SMembers(ctx, key).Result()
		slices.Sort(s)
		v = s
	case "zset":
		v, err = w.c.ZRangeWithScores(ctx, key, 0, -1).Result()
	case "stream":
		var entries []redis.XMessage
		entries, err = w.c.XRange(ctx, key, "-", "+").Result()
		v = fmt.Sprint(entries, w.pending(key))
	}
	require.NoError(w, err)
	return fmt.Sprintf("%s %v", what, v)
}

// pending returns the pending entries of a stream in the ledger's consumer groups, each as
// "CONSUMER ENTRY".
func (w *world) pending(stream string) []string {
	w.Helper()
	var held []string
	for _, group := range []string{keyspace.GroupWorkers, keyspace.GroupAggregator} {
		p, err := w.c.XPendingExt(w.Context(), &redis.XPendingExtArgs{Stream: stream, Group: group, Start: "-", End: "+", Count: 10_000}).Result()
		if err != nil {
			require.ErrorContains(w, err, "NOGROUP")
			continue
		}
		for _, e := range p {
			held = append(held, e.Consumer+" "+e.ID)
		}
	}
	return held
}

// unchanged runs a step and checks that it changes nothing in the partition but the counters stale
// and lost.
func (w *world) unchanged(step func()) {
	w.Helper()
	before := w.dump()
	step()
	require.Equal(w, before, w.dump())
}
