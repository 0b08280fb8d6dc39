package groups

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/groups/apivalue"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// maxPoints is about how many points an answer about the history has at most.
const maxPoints = 1500

// Now returns the time of Redis.
func (s *stats) Now(ctx context.Context) (time.Time, error) {
	now, err := s.conn.Cmd.Time(ctx).Result()
	if err != nil {
		return now, fmt.Errorf("read the time of Redis: %w", err)
	}
	return now, nil
}

// Record stores a sample of these figures, which were read at the time at, by Redis. Of each slot
// of time the first sample is kept, whichever process stores it.
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
	// The sample before the first point is read, too: the rates are differences.
	samples, err := ledger.Samples(ctx, s.conn.Cmd, s.space, slots+int(step/ledger.SampleSlot)+1)
	if err != nil {
		return api.History{}, apiError(err)
	}
	return historyOf(samples, now.Add(-length), step), nil
}

// historyOf returns the points of samples, newest first, that are not older than from. Of each step
// the newest sample becomes a point. A sample that is not older than the one behind it is left out:
// the clock of Redis was set back.
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

// pointOf returns the point at a sample. A total that has become smaller, because a failover of
// Redis has lost writes, counts as unchanged.
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
