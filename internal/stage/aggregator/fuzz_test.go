package aggregator

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Results that are accepted are whole lines of the entries, a job once, by ordinal.
func FuzzParseEntries(f *testing.F) {
	const line = `{"ordinal":1,"duration_ms":1.5,"attempts":1,"data":{"a":1}}`
	f.Add(line, "1 00-trace", line)
	f.Add(line+"\n"+`{"ordinal":0}`, "", `{"ordinal":-1}`)
	f.Add(`{"ordinal":1e3}`, "x y\n", "")
	f.Add(`{"Ordinal":2,"data":`, "9223372036854775808 z", "null")
	f.Fuzz(func(t *testing.T, lines, traces, others string) {
		jobs, err := parseEntries([]redisx.Entry{{ID: "1-1", Fields: []string{"g", "x", "l", lines, "t", traces}}, {ID: "1-2", Fields: []string{"l", others, "t"}}})
		if err != nil {
			require.ErrorContains(t, err, "holds no result")
			return
		}
		all := append(strings.Split(lines, "\n"), strings.Split(others, "\n")...)
		for i, j := range jobs {
			require.GreaterOrEqual(t, j.Ordinal, int64(0))
			require.False(t, i > 0 && jobs[i-1].Ordinal >= j.Ordinal, "twice, or not in order")
			require.Contains(t, all, j.line)
			require.True(t, json.Valid([]byte(j.line)))
		}
	})
}
