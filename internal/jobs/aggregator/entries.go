package aggregator

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jsonscan"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/reducer"
)

// reduceBytes and reduceLines bound the results of one script call: when the entries of a group
// reach one of them, the group's next entry begins a new batch.
const (
	reduceBytes = 1 << 20
	reduceLines = 2000
)

// batch holds the entries of one group that one script call reduces.
type batch struct {
	group        string
	entries      []stream.Entry
	bytes, lines int // size and number of all results in entries
}

// groupBatches divides entries into batches, ordered by their first entries. The entries of a batch
// keep their order.
func groupBatches(entries []stream.Entry) []*batch {
	var all []*batch
	open := map[string]*batch{}
	for _, e := range entries {
		group, lines := e.Get(ledger.ResultsGroup), e.Get(ledger.ResultsLines)
		b := open[group]
		if b == nil || b.bytes >= reduceBytes || b.lines >= reduceLines {
			b = &batch{group: group}
			open[group], all = b, append(all, b)
		}
		b.entries = append(b.entries, e)
		b.bytes += len(lines)
		b.lines += 1 + strings.Count(lines, "\n")
	}
	return all
}

// jobResult is the result of one job, as it was read from an entry of the results stream.
type jobResult struct {
	reducer.Result
	line  string // the result's JSON, as it was read
	trace string // trace context that the reduce span follows; "" when the job is not sampled
}

// parseEntries returns the results in entries, which belong to one group, ordered by ordinal. It
// returns each job once. The error names an entry that holds something else.
func parseEntries(entries []stream.Entry) ([]jobResult, error) {
	n := 0
	for _, e := range entries {
		n += 1 + strings.Count(e.Get(ledger.ResultsLines), "\n")
	}
	jobs := make([]jobResult, 0, n)
	for _, e := range entries {
		traces := parseTraces(e.Get(ledger.ResultsTraces))
		text := e.Get(ledger.ResultsLines)
		raw := []byte(text) // one copy of the text, shared by all its results
		for at := 0; at <= len(text); {
			end := len(text)
			if i := strings.IndexByte(text[at:], '\n'); i >= 0 {
				end = at + i
			}
			r, ok := parseLine(raw[at:end:end])
			if !ok {
				return nil, fmt.Errorf("entry %s holds no result: a line of JSON with an ordinal is expected", e.ID)
			}
			jobs = append(jobs, jobResult{Result: r, line: text[at:end], trace: traces[r.Ordinal]})
			at = end + 1
		}
	}
	for i := 1; i < len(jobs); i++ {
		if jobs[i].Ordinal <= jobs[i-1].Ordinal {
			slices.SortStableFunc(jobs, func(a, b jobResult) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
			return slices.CompactFunc(jobs, func(a, b jobResult) bool { return a.Ordinal == b.Ordinal }), nil
		}
	}
	return jobs, nil
}

// parseTraces returns the trace contexts of sampled jobs by ordinal. text has one line "ordinal
// traceparent" for each.
func parseTraces(text string) map[int64]string {
	if text == "" {
		return nil
	}
	traces := map[int64]string{}
	for line := range strings.SplitSeq(text, "\n") {
		if ordinal, parent, ok := strings.Cut(line, " "); ok {
			n, _ := strconv.ParseInt(ordinal, 10, 64)
			traces[n] = parent
		}
	}
	return traces
}

// parseLine returns the result in a line. scanLine, which is faster, reads a line as workers write
// it for a job without a key; encoding/json reads any other, and so the lines of jobs with a key.
func parseLine(line []byte) (reducer.Result, bool) {
	if r, ok := scanLine(line); ok {
		return r, true
	}
	return decodeLine(line)
}

// decodeLine reads a result with encoding/json. It refuses a line that is not JSON, or that has no
// ordinal or a negative one.
func decodeLine(line []byte) (reducer.Result, bool) {
	var r struct {
		Ordinal    *int64          `json:"ordinal"`
		DurationMS float64         `json:"duration_ms"`
		Attempts   int             `json:"attempts"`
		Data       json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(line, &r); err != nil || r.Ordinal == nil || *r.Ordinal < 0 {
		return reducer.Result{}, false
	}
	return reducer.Result{Ordinal: *r.Ordinal, Attempts: r.Attempts, DurationMS: r.DurationMS, Data: r.Data}, true
}

// scanLine reads a result of exactly the form {"ordinal":N,"duration_ms":F,"attempts":N,"data":…}.
// For any other form it returns false; decodeLine may still accept the line. BenchmarkParseEntries
// measures it, and FuzzScanLine compares it with encoding/json.
func scanLine(line []byte) (r reducer.Result, ok bool) {
	const maxDepth = 100 // of arrays and objects in the data
	ordinal, i := numberAfter(line, 0, `{"ordinal":`)
	duration, i := numberAfter(line, i, `,"duration_ms":`)
	attempts, i := numberAfter(line, i, `,"attempts":`)
	start := jsonscan.Literal(line, i, `,"data":`)
	end := jsonscan.Value(line, start, maxDepth)
	if end < 0 || string(line[end:]) != "}" {
		return r, false
	}
	r.Data = line[start:end:end]
	var errs [3]error
	r.Ordinal, errs[0] = strconv.ParseInt(string(ordinal), 10, 64)
	r.DurationMS, errs[1] = strconv.ParseFloat(string(duration), 64)
	r.Attempts, errs[2] = strconv.Atoi(string(attempts))
	return r, errs == [3]error{} && r.Ordinal >= 0
}

// numberAfter skips prefix and the number behind it, and returns the number. end is -1 when one of
// both is missing.
func numberAfter(line []byte, i int, prefix string) (number []byte, end int) {
	start := jsonscan.Literal(line, i, prefix)
	if end = jsonscan.Number(line, start); end < 0 {
		return nil, -1
	}
	return line[start:end], end
}

// recordSpans records, for each sampled job, the span "reduce", which ends the job's trace, and a
// span of the batch that links to these. began is when the batch began.
func (p *partitionReducer) recordSpans(ctx context.Context, tenant, group string, jobs []jobResult, began time.Time) {
	batch := p.Tel.NewBatch("reduce", p.partition.ResultStream(), began)
	for i := range jobs {
		j := &jobs[i]
		span := telemetry.JobSpan{Parent: j.trace, Kind: trace.SpanKindConsumer, Start: began}
		batch.Job(ctx, span, func() []attribute.KeyValue {
			return telemetry.JobAttributes(tenant, group, j.Ordinal, j.Attempts)
		})
	}
	batch.End(ctx, len(jobs))
}
