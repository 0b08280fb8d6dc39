package aggregator

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/reducer"
)

// What one script reduces at most: entries are taken together until they weigh this.
const (
	reduceBytes = 1 << 20
	reduceLines = 2000
)

// portion is what one script reduces: entries of one group.
type batch struct {
	group        string
	entries      []stream.Entry
	bytes, lines int
}

// portions sorts entries by group, in the order in which they came.
func groupBatches(entries []stream.Entry) []*batch {
	var all []*batch
	open := map[string]*batch{}
	for _, e := range entries {
		group, lines := e.Get("g"), e.Get("l")
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

// done is one job's result with its line.
type jobResult struct {
	reducer.Result
	line  string
	trace string
}

// parseEntries reads the results of one group's entries, by ascending ordinal, each once.
func parseEntries(entries []stream.Entry) ([]jobResult, error) {
	n := 0
	for _, e := range entries {
		n += 1 + strings.Count(e.Get("l"), "\n")
	}
	jobs := make([]jobResult, 0, n)
	for _, e := range entries {
		traces := parseTraces(e.Get("t"))
		text := e.Get("l")
		raw := []byte(text) // one copy, of which all results are parts
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

// parseTraces reads where the traces of sampled jobs go on, by ordinal.
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

// parseLine reads a result: as workers write it without a detour, any other by encoding/json.
func parseLine(line []byte) (reducer.Result, bool) {
	if r, ok := scanLine(line); ok {
		return r, true
	}
	return decodeLine(line)
}

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

// scanLine reads {"ordinal":N,"duration_ms":F,"attempts":N,"data":…}, or says that the line is not
// of exactly this form.
func scanLine(line []byte) (r reducer.Result, ok bool) {
	s := jsonScanner{text: line}
	ordinal := s.numberAfter(`{"ordinal":`)
	duration := s.numberAfter(`,"duration_ms":`)
	attempts := s.numberAfter(`,"attempts":`)
	if !s.skipLiteral(`,"data":`) {
		return r, false
	}
	start := s.pos
	if !s.skipValue(0) || !bytes.Equal(line[s.pos:], []byte("}")) {
		return r, false
	}
	r.Data = line[start:s.pos:s.pos]
	var errs [3]error
	r.Ordinal, errs[0] = strconv.ParseInt(string(ordinal), 10, 64)
	r.DurationMS, errs[1] = strconv.ParseFloat(string(duration), 64)
	r.Attempts, errs[2] = strconv.Atoi(string(attempts))
	return r, errs == [3]error{} && r.Ordinal >= 0
}
