package ingest_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

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
