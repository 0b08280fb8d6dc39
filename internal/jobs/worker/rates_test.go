package worker

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// startRates returns the start rates of a report.
func startRates(r *rates, now time.Time) map[string]float64 {
	perSecond, _ := r.report(now)
	return perSecond
}

func TestStartRates(t *testing.T) {
	t.Parallel()
	s := newRates()
	now := time.Unix(1_900_000_000, 0)
	require.Empty(t, startRates(s, now))

	// 10 starts every 100 ms: a steady rate.
	run := func(n int, span time.Duration) {
		for range int(span / (100 * time.Millisecond)) {
			s.started(now, "T", n)
			now = now.Add(100 * time.Millisecond)
		}
	}
	run(10, time.Second)
	require.InDelta(t, 100, startRates(s, now)["T"], 1, "soon after the first start")
	run(10, 9*time.Second)
	require.InDelta(t, 100, startRates(s, now)["T"], 6)
	run(20, 2*time.Second)
	require.Greater(t, startRates(s, now)["T"], 130.0, "it rises before a whole rateSpan has passed")
	run(20, 8*time.Second)
	require.InDelta(t, 200, startRates(s, now)["T"], 12)

	now = now.Add(rateSpan + time.Second)
	require.Empty(t, startRates(s, now), "a type without recent starts has no rate")
}

// TestStartRatesAreSteadyDespiteBursts: when jobs start in one burst at the beginning of each
// second, the rate is about the same at any time within the second.
func TestStartRatesAreSteadyDespiteBursts(t *testing.T) {
	t.Parallel()
	s := newRates()
	start := time.Unix(1_900_000_000, 0)
	for at := time.Duration(0); at < 20*time.Second; at += 100 * time.Millisecond {
		if at%time.Second == 0 {
			s.started(start.Add(at), "T", 6)
		}
		if at > rateSpan {
			require.InDelta(t, 6, startRates(s, start.Add(at))["T"], 1.5, "%v", at)
		}
	}
}

func TestStartRatesCountAtLeastHalfASecond(t *testing.T) {
	t.Parallel()
	s := newRates()
	now := time.Unix(1_900_000_000, 0)
	s.started(now, "T", 5)
	require.InDelta(t, 10, startRates(s, now)["T"], 0.001, "the span is at least minSpan")
	require.InDelta(t, 10, startRates(s, now)["T"], 0.001, "a second call returns the same")
}

func TestRunTimes(t *testing.T) {
	r, now := newRates(), time.Now()
	milliseconds := func(now time.Time) map[string]float64 {
		_, runMS := r.report(now)
		return runMS
	}
	require.Empty(t, milliseconds(now))
	r.ran("A", 2, 40*time.Millisecond)
	r.ran("B", 1, time.Second)
	r.ran("C", 0, 0)
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, milliseconds(now.Add(500*time.Millisecond)))
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, milliseconds(now.Add(time.Second)), "a type without new jobs keeps its mean")
	r.ran("A", 1, 120*time.Millisecond)
	got := milliseconds(now.Add(time.Second + runAge))
	require.InDelta(t, 20+100*(1-1/math.E), got["A"], 0.01)
	require.InDelta(t, 1000, got["B"], 0)
}
