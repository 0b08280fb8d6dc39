package aggregator

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

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
