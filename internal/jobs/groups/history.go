package groups

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/apivalue"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// maxPoints is about the most points that an answer about the history has.
const maxPoints = 1500

// Now returns the time of Redis.
func (s *stats) Now(ctx context.Context) (time.Time, error) {
	now, err := s.conn.Cmd.Time(ctx).Result()
	if err != nil {
		return now, fmt.Errorf("read the time of Redis: %w", err)
	}
	return now, nil
}

// Record stores the figures st as a sample; at is when they were read, by Redis. Only the first
// sample of each slot of time is stored, whichever process sends it.
func (s *stats) Record(ctx context.Context, at time.Time, st api.Stats) error {
	sample := ledger.Sample{At: at, JobTotals: st.Totals, Gauges: api.Gauges{ActiveTenants: st.ActiveTenants}}
	for _, t := range st.Types {
		sample.Waiting += t.Waiting
		sample.NonReady += t.NonReady
		sample.Ready += t.Ready
		sample.InFlight += t.InFlight
	}
	for _, w := range st.Workers {
		sample.Pool += int64(w.Workers)
		sample.Busy += int64(w.Active)
	}
	_, err := ledger.RecordSample(ctx, s.conn.Cmd, s.space, sample)
	return err
}

// History returns the points of the last minutes.
func (s *stats) History(ctx context.Context, minutes int) (api.History, error) {
	who, err := caller(ctx)
	switch {
	case err != nil:
		return api.History{}, err
	case !who.May(auth.ReadMetrics):
		return api.History{}, api.ErrNotAllowed
	}
	now, err := s.Now(ctx)
	if err != nil {
		return api.History{}, apiError(err)
	}
	length := time.Duration(minutes) * time.Minute
	slots := int(length / ledger.SampleSlot)
	step := ledger.SampleSlot * time.Duration((slots+maxPoints-1)/maxPoints)
	// The sample before the first point is read, too: a rate is computed from two samples.
	samples, err := ledger.Samples(ctx, s.conn.Cmd, s.space, slots+int(step/ledger.SampleSlot)+1)
	if err != nil {
		return api.History{}, apiError(err)
	}
	return historyOf(samples, now.Add(-length), step), nil
}

// historyOf turns samples, newest first, into the points of the history since from. The newest
// sample of each step becomes a point. A sample that is not older than the one before it in the
// list is left out: the clock of Redis was set back.
func historyOf(samples []ledger.Sample, from time.Time, step time.Duration) api.History {
	h := api.History{StepSeconds: int(step / time.Second), Points: []api.HistoryPoint{}}
	var kept []ledger.Sample // newest first, one for each step
	for _, s := range samples {
		if n := len(kept); n > 0 && !s.At.Truncate(step).Before(kept[n-1].At.Truncate(step)) {
			continue
		}
		kept = append(kept, s)
	}
	for i := len(kept) - 2; i >= 0; i-- {
		if s := kept[i]; !s.At.Before(from) {
			h.Points = append(h.Points, pointOf(kept[i+1], s))
		}
	}
	return h
}

// pointOf computes a point of the history from a sample and the one before it. A total that has
// become smaller, because a failover of Redis has lost writes, counts as unchanged.
func pointOf(before, s ledger.Sample) api.HistoryPoint {
	seconds := s.At.Sub(before.At).Seconds()
	rate := func(total, earlier int64) float64 {
		return apivalue.Round(float64(max(0, total-earlier))/seconds, 100)
	}
	return api.HistoryPoint{
		T:         s.At,
		Accepted:  rate(s.Accepted, before.Accepted),
		Started:   rate(s.Started, before.Started),
		Done:      rate(s.Done, before.Done),
		Failed:    rate(s.Failed, before.Failed),
		Retried:   rate(s.Retried, before.Retried),
		Throttled: rate(s.Throttled, before.Throttled),
		Gauges:    s.Gauges,
	}
}
