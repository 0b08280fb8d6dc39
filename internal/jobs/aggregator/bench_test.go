package aggregator

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/reducer"
)

// entriesOf returns n entries of 200 results each; the entries belong to the given number of groups
// in turn.
func entriesOf(n, groups int) []stream.Entry {
	entries := make([]stream.Entry, n)
	for i := range entries {
		lines := make([]string, 200)
		for j := range lines {
			lines[j] = fmt.Sprintf(`{"ordinal":%d,"duration_ms":%d.%03d,"attempts":1,"data":{"id":"msg-%06d","accepted":true,"cost":0.%02d}}`, i*200+j, j%7, j, j, j%100)
		}
		entries[i] = stream.Entry{ID: fmt.Sprintf("%d-1", i), Fields: []string{"g", fmt.Sprint("g", i%groups), "l", strings.Join(lines, "\n"), "t", ""}}
	}
	return entries
}

func reportPerJob(b *testing.B, jobs int) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(jobs), "ns/job")
}

func BenchmarkParseEntries(b *testing.B) {
	entries := entriesOf(1, 1)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseEntries(entries); err != nil {
			b.Fatal(err)
		}
	}
	reportPerJob(b, 200)
}

// BenchmarkParseLine compares scanLine with encoding/json.
func BenchmarkParseLine(b *testing.B) {
	line, _, _ := strings.Cut(entriesOf(1, 1)[0].Get(ledger.ResultsLines), "\n")
	for name, parse := range map[string]func([]byte) (reducer.Result, bool){
		"scanLine": scanLine, "encoding/json": decodeLine,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, ok := parse([]byte(line)); !ok {
					b.Fatal("no result")
				}
			}
		})
	}
}

func BenchmarkGroupBatches(b *testing.B) {
	entries := entriesOf(50, 10)
	b.ReportAllocs()
	for b.Loop() {
		groupBatches(entries)
	}
	reportPerJob(b, 50*200)
}

// BenchmarkMerge measures what a process computes for one entry of a cached group.
func BenchmarkMerge(b *testing.B) {
	for name, specs := range map[string][]reducer.Spec{
		"count":        nil,
		"sum":          {{As: "x", Op: "sum", Field: "data.cost"}},
		"distribution": {{As: "x", Op: "distribution", Field: "duration_ms"}},
		"collect":      {{As: "x", Op: "collect", Field: "data.id"}},
	} {
		b.Run(name, func(b *testing.B) {
			plan, err := reducer.NewRegistry().Compile(specs)
			require.NoError(b, err)
			k, p := &cachedGroup{state: plan.New()}, &partitionReducer{}
			jobs, err := parseEntries(entriesOf(1, 1))
			require.NoError(b, err)
			b.ReportAllocs()
			for b.Loop() {
				if err := p.addResults(k, jobs, &ledger.ReduceArgs{}); err != nil {
					b.Fatal(err)
				}
			}
			reportPerJob(b, 200)
		})
	}
}
