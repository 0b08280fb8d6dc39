package bench

import (
	"math"
	"slices"
	"time"
)

// percentile returns the p-th percentile by the nearest-rank method: the smallest value that at
// least p percent of the values do not exceed. Values may have any order; without values it is 0.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// median returns the middle value, or the mean of the two middle values.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Quantiles has quantiles of waiting times.
type Quantiles struct {
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	MaxMS float64 `json:"max_ms"`
}

func quantilesOf(ms []float64) Quantiles {
	return Quantiles{round2(percentile(ms, 50)), round2(percentile(ms, 99)), round2(percentile(ms, 100))}
}

// ratio returns a/b, rounded to four decimals; 0 if b is 0.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return round4(a / b)
}

func round2(x float64) float64 { return math.Round(x*1e2) / 1e2 }
func round4(x float64) float64 { return math.Round(x*1e4) / 1e4 }

// perJob returns the µs of a job.
func perJob(d time.Duration, jobs int) float64 {
	return round2(float64(d.Nanoseconds()) / 1e3 / float64(jobs))
}

// sharesOf returns each count / the sum of all counts, and this sum.
func sharesOf(counts []int64) (shares []float64, sum int64) {
	for _, n := range counts {
		sum += n
	}
	for _, n := range counts {
		shares = append(shares, ratio(float64(n), float64(sum)))
	}
	return shares, sum
}

// worstDeviation compares each count with its part of the sum by weight. It returns the largest
// deviation / this part.
func worstDeviation(counts []int64, weights []float64) float64 {
	var sum, weight float64
	for i := range counts {
		sum, weight = sum+float64(counts[i]), weight+weights[i]
	}
	worst := 0.0
	for i := range counts {
		due := sum * weights[i] / weight
		worst = max(worst, math.Abs(float64(counts[i])-due)/max(due, 1))
	}
	return round4(worst)
}
