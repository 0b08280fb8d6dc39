package bench

import (
	"math"

	"github.com/bulkaction/bulkaction/bench/measure"
)

// Quantiles has quantiles of waiting times.
type Quantiles struct {
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	MaxMS float64 `json:"max_ms"`
}

func quantilesOf(ms []float64) Quantiles {
	p := func(p float64) float64 { return measure.Round2(measure.Percentile(ms, p)) }
	return Quantiles{p(50), p(99), p(100)}
}

// sharesOf returns, for each count, its share of the sum of all counts, and this sum.
func sharesOf(counts []int64) (shares []float64, sum int64) {
	for _, n := range counts {
		sum += n
	}
	for _, n := range counts {
		shares = append(shares, measure.Ratio(float64(n), float64(sum)))
	}
	return shares, sum
}

// worstDeviation compares each count with the part of the sum that its weight gives it. It returns
// the largest relative deviation: |count - part| / part.
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
	return measure.Round4(worst)
}
