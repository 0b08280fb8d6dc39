// Package measure reads what processes and Redis use, and computes the statistics of measurements.
// It is shared by the benchmarks and by bench/peers, a module with dependencies of its own, so it
// imports the standard library alone.
package measure

import (
	"math"
	"slices"
	"time"
)

// Percentile returns the p-th percentile by the nearest-rank method: the smallest value that at
// least p percent of the values do not exceed. Values may have any order; without values it is 0.
func Percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Median returns the middle value, or the mean of the two middle values. There must be a value.
func Median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Ratio returns a/b, rounded to four decimals; 0 if b is 0.
func Ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return Round4(a / b)
}

// Round2 rounds to two decimals.
func Round2(x float64) float64 { return math.Round(x*1e2) / 1e2 }

// Round4 rounds to four decimals.
func Round4(x float64) float64 { return math.Round(x*1e4) / 1e4 }

// PerJob returns the µs of a job.
func PerJob(d time.Duration, jobs int) float64 {
	return Round2(float64(d.Nanoseconds()) / 1e3 / float64(jobs))
}
