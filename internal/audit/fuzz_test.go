package audit

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// The fast parser of result lines accepts what encoding/json accepts.
func FuzzResult(f *testing.F) {
	for _, seed := range []string{`{"ordinal":1,"data":{}}`, `{"ordinal":01,"x":1}`, `{"ordinal":-1}`, `{"ordinal":1`, `{"ordinal":1}}`, `{"data":1,"ordinal":2}`, `{"ordinal":1,"ordinal":2}`, `null`, ``, `{"ordinal":99999999999999999999}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, line string) {
		ordinal, ok := parseResultLine(line)
		require.False(t, ok && ordinal < 0)
		var r struct{ Ordinal *int64 }
		if err := json.Unmarshal([]byte(line), &r); err == nil && r.Ordinal != nil && *r.Ordinal >= 0 {
			require.True(t, ok)
		}
	})
}

// No text makes the parsers of queued blobs, moving blobs and failures return an invalid job.
func FuzzBlobs(f *testing.F) {
	for _, seed := range []string{"0|1||{}", "-1|1||", "x", "", "{\"round\":1}\ng|T|1|0|0|0|0|0|0|0||7|1||{}", "\ng|T|1|0|0|0|0|0|0|0||7|1||", "g|T|1|0|0|0|0|0|0|1|S|7|1||"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, ok := ledger.QueuedOrdinal(text); ok {
			require.GreaterOrEqual(t, n, int64(0))
		}
		for _, field := range []string{"7", "07", "-7", text} {
			if n, _, ok := parseFailure("g", field, text); ok {
				require.Equal(t, field, strconv.FormatInt(n, 10))
			}
		}
		if d, err := ledger.ParseJob(text); err == nil {
			require.NotEmpty(t, d.Group)
		}
	})
}
