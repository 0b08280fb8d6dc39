package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench/measure"
)

// at returns events from pairs of numbers: a time in ms and a number of permits.
func at(pairs ...int64) []event {
	var out []event
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, event{pairs[i] * 1000, pairs[i+1]})
	}
	return out
}

func TestWindowsOver(t *testing.T) {
	tests := map[string]struct {
		limiter string
		events  []event
		windows int
		worst   float64
	}{
		"nothing":                               {"fixed", nil, 0, 0},
		"fixed keeps the limit":                 {"fixed", at(0, 5, 999, 5, 1000, 10), 0, 0},
		"fixed breaks it":                       {"fixed", at(0, 5, 999, 6), 1, 1},
		"fixed breaks one window once":          {"fixed", at(0, 20, 10, 1, 1000, 10), 1, 11},
		"fixed breaks two windows":              {"fixed", at(0, 11, 2000, 13), 2, 3},
		"fixed may burst across a border":       {"fixed", at(999, 10, 1000, 10), 0, 0},
		"sliding may not burst across a border": {"sliding", at(999, 10, 1000, 10), 1, 10},
		"sliding frees after a window":          {"sliding", at(100, 10, 1100, 10), 0, 0},
		"sliding just before a window is over":  {"sliding", []event{{100_000, 10}, {1_099_999, 1}}, 1, 1},
		"sliding counts each span":              {"sliding", at(0, 4, 500, 6, 1000, 4, 1400, 1), 1, 1},
		"token allows its burst":                {"token", at(0, 10, 100, 1, 200, 1), 0, 0},
		"token refuses more than its burst":     {"token", at(0, 11), 1, 1},
		"token refills at the rate":             {"token", at(0, 10, 1000, 10, 1500, 5), 0, 0},
		"token holds no more than its burst":    {"token", at(0, 10, 60_000, 11), 1, 1},
		"token over a long span":                {"token", at(0, 10, 500, 5, 900, 5), 1, 1},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			windows, worst := limitRule{tt.limiter, time.Second, 10}.windowsOver(tt.events)
			require.Equal(t, tt.windows, windows)
			require.InDelta(t, tt.worst, worst, 1e-9)
		})
	}
}

// TestTokenLooksAtEverySpan compares the leaky bucket, which excess uses for the token limiter,
// with the definition, which looks at each span.
func TestTokenLooksAtEverySpan(t *testing.T) {
	r := limitRule{"token", time.Second, 10}
	events := at(0, 7, 130, 4, 131, 1, 900, 9, 2500, 3, 2501, 8, 2600, 2)
	for j, got := range r.excess(events) {
		want := -1e18
		for i := range j + 1 {
			sum := 0.0
			for _, e := range events[i : j+1] {
				sum += float64(e.n)
			}
			want = max(want, sum-10*float64(events[j].at-events[i].at)/1e6-10)
		}
		require.InDelta(t, want, got, 1e-9, "span that ends with event %d", j)
	}
}

func TestNewLimitRule(t *testing.T) {
	require.EqualValues(t, 100, newLimitRule("fixed", 1000, 100*time.Millisecond).perWindow)
	require.EqualValues(t, 1, newLimitRule("fixed", 5, 100*time.Millisecond).perWindow, "at least one permit")
}

func TestUsedRatio(t *testing.T) {
	r := limitRule{"fixed", time.Second, 10}
	events := at(500, 10, 1000, 10, 2000, 9, 3000, 10, 4100, 1)
	ratio, windows := r.usedRatio(events, 500_000, 4_100_000)
	require.Equal(t, 3, windows, "the windows of 1, 2 and 3 s; the first and the last are not complete")
	require.InDelta(t, 29.0/30, ratio, 1e-9)

	ratio, windows = r.usedRatio(events, 500_000, 1_900_000)
	require.Zero(t, windows)
	require.Zero(t, ratio)
	require.Equal(t, 5, r.windowCount(events))
	require.Zero(t, r.windowCount(nil))
}

func TestStatistics(t *testing.T) {
	values := []float64{5, 1, 4, 2, 3}
	require.InDelta(t, 3.0, measure.Percentile(values, 50), 0)
	require.InDelta(t, 5.0, measure.Percentile(values, 99), 0)
	require.InDelta(t, 1.0, measure.Percentile(values, 0), 0)
	require.Zero(t, measure.Percentile(nil, 99))
	require.Equal(t, []float64{5, 1, 4, 2, 3}, values, "percentile must not sort its argument")

	shares, sum := sharesOf([]int64{1, 3})
	require.Equal(t, []float64{0.25, 0.75}, shares)
	require.EqualValues(t, 4, sum)
	shares, _ = sharesOf([]int64{0, 0})
	require.Equal(t, []float64{0, 0}, shares)
	require.InDelta(t, 0.0, worstDeviation([]int64{100, 200, 400}, []float64{1, 2, 4}), 0)
	require.InDelta(t, 0.4, worstDeviation([]int64{60, 200, 440}, []float64{1, 2, 4}), 0, "the largest deviation, relative to the due part")
	require.InDelta(t, 1.0, worstDeviation([]int64{0, 300}, []float64{1, 2}), 0, "a count of 0 deviates by 100%")
	require.InDelta(t, 2.0, measure.Ratio(4, 2), 0)
	require.Zero(t, measure.Ratio(4, 0))
}
