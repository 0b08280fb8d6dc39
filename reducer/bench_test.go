package reducer_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/reducer"
)

func BenchmarkAdd(b *testing.B) {
	small := func(i int) []byte {
		return fmt.Appendf(nil, `{"id":"msg-%06d","accepted":true,"cost":%d.%02d,"code":"%d"}`, i, i%7, i%100, 200+i%5)
	}
	cases := []struct {
		name  string
		specs []reducer.Spec
		data  func(i int) []byte
	}{
		{"no_specs", nil, small},
		{"sum", []reducer.Spec{{As: "x", Op: "sum", Field: "data.cost"}}, small},
		{"sum_of_floats", []reducer.Spec{{As: "x", Op: "sum", Field: "data"}}, func(i int) []byte { return fmt.Appendf(nil, "%v", 1/float64(i+3)) }},
		{"sum_behind_10kB", []reducer.Spec{{As: "x", Op: "sum", Field: "data.cost"}}, func(i int) []byte {
			return fmt.Appendf(nil, `{"body":%q,"cost":%d}`, strings.Repeat("x", 10_000), i)
		}},
		{"max", []reducer.Spec{{As: "x", Op: "max", Field: "data.cost"}}, small},
		{"mean_of_duration", []reducer.Spec{{As: "x", Op: "mean", Field: "duration_ms"}}, small},
		{"distribution", []reducer.Spec{{As: "x", Op: "distribution", Field: "data.cost"}}, small},
		{"distribution_of_duration", []reducer.Spec{{As: "x", Op: "distribution", Field: "duration_ms"}}, small},
		{"count_by", []reducer.Spec{{As: "x", Op: "count_by", Field: "data.code"}}, small},
		{"count_by_ids", []reducer.Spec{{As: "x", Op: "count_by", Field: "data.id"}}, small},
		{"collect", []reducer.Spec{{As: "x", Op: "collect", Field: "data.id"}}, small},
		{"eight", []reducer.Spec{
			{As: "a", Op: "count"}, {As: "b", Op: "sum", Field: "data.cost"}, {As: "c", Op: "min", Field: "data.cost"},
			{As: "d", Op: "max", Field: "data.cost"}, {As: "e", Op: "mean", Field: "data.cost"}, {As: "f", Op: "distribution", Field: "duration_ms"},
			{As: "g", Op: "count_by", Field: "data.code"}, {As: "h", Op: "collect", Field: "data.id"},
		}, small},
	}
	for _, c := range cases {
		b.Run(c.name, func(b *testing.B) {
			results := make([]reducer.Result, 10_000)
			for i := range results {
				results[i] = reducer.Result{Ordinal: int64(i), DurationMS: float64(i*7919%100_000) / 1e3, Data: c.data(i)}
			}
			s := compile(b, c.specs...).New()
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				_ = s.Add(results[i])
				if i++; i == len(results) {
					i = 0
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
		})
	}
}

// BenchmarkStore measures how long it takes to encode and decode a state of 2,000 results. That is
// what an aggregator does to store a group's partial aggregate and to load it.
func BenchmarkStore(b *testing.B) {
	for _, op := range []string{"sum", "distribution", "count_by", "collect"} {
		b.Run(op, func(b *testing.B) {
			plan := compile(b, reducer.Spec{As: "x", Op: op, Field: "data"})
			s := plan.New()
			for i := range 2000 {
				require.NoError(b, s.Add(reducer.Result{Ordinal: int64(i), Data: fmt.Appendf(nil, "%d.%d", i, i%10)}))
			}
			b.ReportAllocs()
			var size int
			for b.Loop() {
				encoded, err := s.Encode()
				require.NoError(b, err)
				s, err = plan.Decode(encoded)
				require.NoError(b, err)
				size = len(encoded)
			}
			b.ReportMetric(float64(size), "bytes")
		})
	}
}
