package stagetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Held is a job that a test has started like a worker, and whose outcome it has not reported yet.
type Held struct {
	ledger.Job
	Entry string
	At    time.Time // when it was started
}

// Take waits until it has read and started n jobs of a type in the first partition, like a worker
// that then reports nothing.
func (w *World) Take(typ, consumer string, n int) []Held {
	w.T.Helper()
	if n == 0 {
		return nil
	}
	w.ensure(w.P.Ready(typ), keyspace.GroupWorkers)
	var jobs []Held
	w.Await("jobs to take", func() bool {
		got, err := w.Conn.Cmd.XReadGroup(w.ctx(), &redis.XReadGroupArgs{
			Group:    keyspace.GroupWorkers,
			Consumer: consumer,
			Streams:  []string{w.P.Ready(typ), ">"},
			Count:    int64(n - len(jobs)),
			Block:    -1,
		}).Result()
		if errors.Is(err, redis.Nil) {
			return false
		}
		require.NoError(w.T, err)
		for _, m := range got[0].Messages {
			d, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
			require.NoError(w.T, err)
			r, err := ledger.Start(w.ctx(), w.Conn.Cmd, w.P, typ,
				[]ledger.StartGroup{{
					Group: d.Group,
					Jobs:  []ledger.StartJob{{Entry: m.ID, Ordinal: d.Ordinal, Attempt: d.Attempt}},
				}})
			require.NoError(w.T, err)
			require.EqualValues(w.T, d.Attempt, r.Tokens[0])
			jobs = append(jobs, Held{d, m.ID, time.Now()})
		}
		return len(jobs) == n
	})
	return jobs
}

// Done reports jobs of one type as done, each with data as its result. Consecutive jobs of a group
// share an entry of the results stream.
func (w *World) Done(data string, jobs ...Held) {
	w.T.Helper()
	w.report(jobs, func(g *ledger.GroupOutcome, j Held) {
		g.Done = append(g.Done, ledger.DoneJob{
			Entry: j.Entry, Ordinal: j.Ordinal, Attempt: j.Attempt,
			Line: fmt.Appendf(nil, `{"ordinal":%d,"duration_ms":1.5,"attempts":%d,"data":%s}`,
				j.Ordinal, j.Attempt, data),
		})
	})
}

// Fail reports jobs of one type as failed, with a permanent error.
func (w *World) Fail(code string, jobs ...Held) {
	w.T.Helper()
	w.report(jobs, func(g *ledger.GroupOutcome, j Held) {
		g.Others = append(g.Others, ledger.OtherJob{
			Entry:   j.Entry,
			Ordinal: j.Ordinal,
			Attempt: j.Attempt,
			Kind:    ledger.OutcomeFailed,
			Waits:   j.Waits,
			Queued:  []byte(j.Queued),
			Code:    code,
			Text:    "it broke",
		})
	})
}

func (w *World) report(jobs []Held, add func(*ledger.GroupOutcome, Held)) {
	w.T.Helper()
	if len(jobs) == 0 {
		return
	}
	var groups []ledger.GroupOutcome
	for _, j := range jobs {
		if n := len(groups); n == 0 || groups[n-1].Group != j.Group {
			groups = append(groups, ledger.GroupOutcome{Group: j.Group})
		}
		add(&groups[len(groups)-1], j)
	}
	r, err := ledger.Outcome(w.ctx(), w.Conn.Cmd, w.P, jobs[0].Type, ledger.Congestion{}, groups)
	require.NoError(w.T, err)
	require.EqualValues(w.T, len(jobs), r.Owned)
}

// ReadResults reads the new entries of the results stream as an aggregator that stops before it
// reduces them: they stay pending for this consumer.
func (w *World) ReadResults(consumer string) []redis.XMessage {
	w.T.Helper()
	w.ensure(w.P.ResultStream(), keyspace.GroupAggregator)
	got, err := w.Conn.Cmd.XReadGroup(w.ctx(), &redis.XReadGroupArgs{
		Group:    keyspace.GroupAggregator,
		Consumer: consumer,
		Streams:  []string{w.P.ResultStream(), ">"},
		Count:    10_000,
		Block:    -1,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	require.NoError(w.T, err)
	return got[0].Messages
}

// Reduce reads all results that no aggregator has read yet, and reduces them like an aggregator.
// The groups must not have aggregates.
func (w *World) Reduce() {
	w.T.Helper()
	for _, m := range w.ReadResults("test") {
		a := ledger.ReduceArgs{
			Group:   m.Values["g"].(string),
			Partial: "0",
			Lines:   []byte(m.Values["l"].(string)),
			Entries: []string{m.ID},
		}
		for line := range strings.SplitSeq(string(a.Lines), "\n") {
			a.Ordinals = append(a.Ordinals, Decode[struct{ Ordinal int64 }](w.T, line).Ordinal)
		}
		state, err := w.Store.Merged("", nil)
		require.NoError(w.T, err)
		a.State, err = state.Encode()
		require.NoError(w.T, err)
		partial := ledger.ReadPartials(w.ctx(), w.Conn.Cmd, w.P, a.Partial, []string{a.Group})[0]
		require.NoError(w.T, partial.Err)
		a.Version = partial.Version
		r, err := ledger.Reduce(w.ctx(), w.Conn.Cmd, w.P, a)
		require.NoError(w.T, err)
		require.Equal(w.T, ledger.ReduceOK, r[0].State)
	}
}

// Finish makes all waiting and ready jobs of a type in the first partition done and reduced, by the
// scripts that the roles would call. No job of the type may be in flight.
func (w *World) Finish(typ string) {
	w.T.Helper()
	w.Admit(typ)
	n, err := w.Conn.Cmd.XLen(context.WithoutCancel(w.T.Context()), w.P.Ready(typ)).Result()
	require.NoError(w.T, err)
	w.Done("null", w.Take(typ, "test", int(n))...)
	w.Reduce()
}
