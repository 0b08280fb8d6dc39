package bench

import (
	"math"
	"slices"
)

// percentile is the nearest-rank percentile of values in any order: the least one that p percent
// do not exceed.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// ratio is a/b to four digits; 0 where there is nothing to compare with.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return round4(a / b)
}

func round4(x float64) float64 { return math.Round(x*1e4) / 1e4 }

// sharesOf are the parts that counts have of their sum.
func sharesOf(counts []int64) []float64 {
	var sum int64
	for _, n := range counts {
		sum += n
	}
	out := make([]float64, len(counts))
	for i, n := range counts {
		out[i] = ratio(float64(n), float64(sum))
	}
	return out
}

// worstDeviation is by how much the share that is furthest off differs from what its weight is due, as a
// part of that.
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
