package integration

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

// TestAppendsAndSealsInAnyOrder: two ingest processes read three groups of 50 appends, each of
// which is there three times. One group is sealed first, one last, and one has all its messages in
// random order. Each group gets its 150 jobs once.
func TestAppendsAndSealsInAnyOrder(t *testing.T) {
	t.Parallel()
	const appends, each, times = 50, 3, 3
	s := start(t, replicas("ingest", 2))
	submission := func(group string) []any {
		return []any{"type", groupSubmit, "id", group + ".submit", "data", fmt.Sprintf(`{"id":%q,"tenant":"acme","type":"NOOP"}`, group)}
	}
	addition := func(group string, i int) []any {
		return []any{"type", jobsAppend, "id", fmt.Sprintf("%s.%d", group, i), "data",
			fmt.Sprintf(`{"group":%q,"jobs":[{"payload":{}},{"payload":{}},{"payload":{}}]}`, group)}
	}
	sealing := func(group, total string) []any {
		return []any{"type", groupSeal, "data", fmt.Sprintf(`{"group":%q%s}`, group, total)}
	}
	random := rand.New(rand.NewPCG(1, 1))
	var all [][]any // each append several times
	shuffled := func(group string) [][]any {
		all = nil
		for i := range appends {
			for range times {
				all = append(all, addition(group, i))
			}
		}
		random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all
	}
	total := fmt.Sprintf(`,"total":%d`, appends*each)

	last := append([][]any{submission("sealed-last")}, shuffled("sealed-last")...)
	last = append(last, sealing("sealed-last", ""), sealing("sealed-last", ""))

	first := append([][]any{submission("sealed-first"), sealing("sealed-first", total)}, shuffled("sealed-first")...)

	anyhow := append(shuffled("anyhow"), submission("anyhow"), submission("anyhow"), sealing("anyhow", total), sealing("anyhow", total))
	random.Shuffle(len(anyhow), func(i, j int) { anyhow[i], anyhow[j] = anyhow[j], anyhow[i] })

	_, err := s.rdb.Pipelined(s.ctx(), func(pipe redis.Pipeliner) error {
		for i := range max(len(last), len(first), len(anyhow)) {
			for _, messages := range [][][]any{last, first, anyhow} {
				if i < len(messages) {
					pipe.XAdd(s.ctx(), &redis.XAddArgs{Stream: s.space.Ingest(), Values: messages[i]})
				}
			}
		}
		return nil
	})
	require.NoError(t, err)

	want := api.Counts{Accepted: appends * each, Done: appends * each}
	for _, group := range []string{"sealed-last", "sealed-first", "anyhow"} {
		g := s.wait(group)
		require.Equal(t, want, g.Counts, group)
		require.True(t, g.Sealed)
	}
	// Messages that are repeated after the end of their group are acknowledged and change nothing.
	for _, m := range append(append(last, first...), anyhow...) {
		s.xadd(s.space.Ingest(), m...)
	}
	s.await("nothing pending", func() bool { return s.rdb.XLen(s.ctx(), s.space.Ingest()).Val() == 0 })
	for _, group := range []string{"sealed-last", "sealed-first", "anyhow"} {
		require.Equal(t, want, s.group(group).Counts, group)
	}
	rejected, err := s.rdb.XRange(s.ctx(), s.space.Rejected(), "-", "+").Result()
	require.NoError(t, err)
	require.Empty(t, rejected)
	both := map[string]bool{}
	consumers, err := s.rdb.XInfoConsumers(s.ctx(), s.space.Ingest(), "ingest").Result()
	require.NoError(t, err)
	for _, c := range consumers {
		both[c.Name] = true
	}
	require.Len(t, both, 2)
}

// TestRepeatedMessageWithOtherContent: three messages with the id m1 append one, two and three
// jobs, one after the other, while two ingest processes run. The group gets the one job of the
// first message.
func TestRepeatedMessageWithOtherContent(t *testing.T) {
	t.Parallel()
	s := start(t, replicas("ingest", 2))
	s.xadd(s.space.Ingest(), "type", groupSubmit, "data", `{"id":"g","type":"NOOP","jobs":[]}`)
	for _, n := range []string{`{"payload":{}}`, `{"payload":{}},{"payload":{}}`, `{"payload":{}},{"payload":{}},{"payload":{}}`} {
		s.xadd(s.space.Ingest(), "type", jobsAppend, "id", "m1", "data", `{"group":"g","jobs":[`+n+`]}`)
		s.await("the message is acknowledged", func() bool { return s.rdb.XLen(s.ctx(), s.space.Ingest()).Val() == 0 })
	}
	s.xadd(s.space.Ingest(), "type", groupSeal, "data", `{"group":"g"}`)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("g").Counts)
}
