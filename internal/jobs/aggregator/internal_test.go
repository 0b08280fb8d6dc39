package aggregator

import (
	"encoding/json"
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

// FuzzParseEntries: accepted results are whole lines of the entries, each job once, by ascending
// ordinal.
func FuzzParseEntries(f *testing.F) {
	const line = `{"ordinal":1,"duration_ms":1.5,"attempts":1,"data":{"a":1}}`
	f.Add(line, "1 00-trace", line)
	f.Add(line+"\n"+`{"ordinal":0}`, "", `{"ordinal":-1}`)
	f.Add(`{"ordinal":1e3}`, "x y\n", "")
	f.Add(`{"Ordinal":2,"data":`, "9223372036854775808 z", "null")
	f.Fuzz(func(t *testing.T, lines, traces, others string) {
		jobs, err := parseEntries([]stream.Entry{{ID: "1-1", Fields: []string{"g", "x", "l", lines, "t", traces}}, {ID: "1-2", Fields: []string{"l", others, "t"}}})
		if err != nil {
			require.ErrorContains(t, err, "holds no result")
			return
		}
		all := append(strings.Split(lines, "\n"), strings.Split(others, "\n")...)
		for i, j := range jobs {
			require.GreaterOrEqual(t, j.Ordinal, int64(0))
			require.False(t, i > 0 && jobs[i-1].Ordinal >= j.Ordinal, "a job twice, or out of order")
			require.Contains(t, all, j.line)
			require.True(t, json.Valid([]byte(j.line)))
		}
	})
}

// FuzzScanLine: a line that scanLine accepts has the result that encoding/json reads.
func FuzzScanLine(f *testing.F) {
	for _, data := range []string{
		`null`, `true`, `"a\u00fc\"\n"`, `{}`, `[ ]`, `{"a":[1,-0.5e+7,{"b":false}],"c":""}`, `{"a" : [ 1 , 2 ] }`, `01`, `1.`, `-`, `{"a":1,}`, `[1 2]`, `"`, `"\x"`, "\"\xff\"", `tru`, ``,
		strings.Repeat("[", 150) + strings.Repeat("]", 150),
	} {
		f.Add(`{"ordinal":7,"duration_ms":0.25,"attempts":1,"data":` + data + `}`)
	}
	f.Add(`{"ordinal":-0,"duration_ms":1e400,"attempts":1,"data":1}`)
	f.Add(`{"ordinal":1,"duration_ms":1e-400,"attempts":9223372036854775808,"data":1}`)
	f.Add(`{"ordinal":1.0,"duration_ms":01,"attempts":1,"data":1} `)
	f.Add(`{"ordinal":1,"duration_ms":1,"attempts":1,"data":1,"ordinal":2}`)
	f.Fuzz(func(t *testing.T, line string) {
		scanned, ok := scanLine([]byte(line))
		if !ok {
			return
		}
		decoded, ok := decodeLine([]byte(line))
		require.True(t, ok)
		require.Equal(t, decoded, scanned)
	})
}

// TestGroupCacheIsBounded: the cache keeps its bounds in number and in bytes, and always holds the
// group that was put last.
func TestGroupCacheIsBounded(t *testing.T) {
	t.Parallel()
	m := groupCache{groups: map[string]*cachedGroup{}}
	for i := range 3 * maxCachedGroups {
		k := &cachedGroup{size: 1 + i%3*maxCachedBytes/100}
		m.put(fmt.Sprint(i/2), k)
		require.Same(t, k, m.groups[fmt.Sprint(i/2)])
		require.LessOrEqual(t, len(m.groups), maxCachedGroups)
		require.LessOrEqual(t, m.bytes, maxCachedBytes)
	}
	for g := range m.groups {
		m.remove(g)
	}
	require.Zero(t, m.bytes)
}
