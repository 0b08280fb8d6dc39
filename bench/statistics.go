package bench

import (
	"math"
	"slices"
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

// ratio returns a/b, rounded to four decimals; 0 if b is 0.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return round4(a / b)
}

func round4(x float64) float64 { return math.Round(x*1e4) / 1e4 }

// sharesOf returns each count / the sum of all counts.
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
