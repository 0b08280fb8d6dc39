package main

import (
	"slices"
	"strconv"
)

// distribution draws for each percentile of the groups how long they took, once alone and once
// beside other work. The values (seconds) are in ascending order.
func distribution(title, subtitle string, alone, beside []float64) chart {
	const points = 101
	quantile := func(values []float64) []float64 {
		out := make([]float64, points)
		for i := range out {
			if len(values) > 0 {
				out[i] = 1000 * values[min(len(values)-1, i*len(values)/(points-1))]
			}
		}
		return out
	}
	labels := make([]string, points)
	for i := 0; i < points; i += 10 {
		labels[i] = strconv.Itoa(i)
	}
	return chart{
		title:    title,
		subtitle: subtitle,
		x:        "percentile of groups",
		y:        "ms from accepted to COMPLETED",
		lines:    true,
		labels:   labels,
		series:   []series{{"alone", quantile(alone)}, {"beside it", quantile(beside)}},
	}
}

func sorted(values []float64) []float64 { return slices.Sorted(slices.Values(values)) }
