package read_test

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestParseResultLinesAndBlobs(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]int64{
		`{"ordinal":17,"data":1}`: 17, `{"ordinal":3}`: 3, `{"data":{"ordinal":1},"ordinal":2}`: 2, `{ "ordinal" : 9 }`: 9,
		`{"ordinal":-1}`: -1, `{"ordinal":1.5}`: -1, `{"ordinal":"1"}`: -1, `{"data":1}`: -1, `17`: -1, ``: -1, `{"ordinal":`: -1,
	} {
		n, ok := read.ParseResultLine(line)
		require.Equal(t, want >= 0, ok, line)
		if ok {
			require.Equal(t, want, n, line)
		}
	}
	for blob, want := range map[string]int64{"0|1||": 0, "12|1|00-x|{}": 12, "": -1, "12": -1, "|1||": -1, "-1|1||": -1, "x|1||": -1} {
		n, ok := ledger.QueuedOrdinal(blob)
		require.Equal(t, want >= 0, ok, blob)
		if ok {
			require.Equal(t, want, n, blob)
		}
	}
	nonReady, err := ledger.ParseJob("g|T|1|0|0|0|0|0|0|5|E|7|1||{\"a\":\"|\"}")
	require.NoError(t, err)
	require.Equal(t, ledger.ReasonError, nonReady.Reason)
	broken, err := ledger.ParseJob("g|T")
	require.Error(t, err)
	require.Zero(t, broken.Reason)
}

// FuzzResult: the fast parser of result lines accepts each line in which encoding/json finds an
// ordinal of at least 0, and returns no ordinal below 0.
func FuzzResult(f *testing.F) {
	for _, seed := range []string{`{"ordinal":1,"data":{}}`, `{"ordinal":01,"x":1}`, `{"ordinal":-1}`, `{"ordinal":1`, `{"ordinal":1}}`, `{"data":1,"ordinal":2}`, `{"ordinal":1,"ordinal":2}`, `null`, ``, `{"ordinal":99999999999999999999}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, line string) {
		ordinal, ok := read.ParseResultLine(line)
		require.False(t, ok && ordinal < 0)
		var r struct{ Ordinal *int64 }
		if err := json.Unmarshal([]byte(line), &r); err == nil && r.Ordinal != nil && *r.Ordinal >= 0 {
			require.True(t, ok)
		}
	})
}

// FuzzBlobs: no input makes the parsers of queued blobs, moving blobs and failures return an
// invalid job.
func FuzzBlobs(f *testing.F) {
	for _, seed := range []string{"0|1||{}", "-1|1||", "x", "", "{\"round\":1}\ng|T|1|0|0|0|0|0|0|0||7|1||{}", "\ng|T|1|0|0|0|0|0|0|0||7|1||", "g|T|1|0|0|0|0|0|0|1|S|7|1||"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if n, ok := ledger.QueuedOrdinal(text); ok {
			require.GreaterOrEqual(t, n, int64(0))
		}
		for _, field := range []string{"7", "07", "-7", text} {
			if n, _, ok := read.ParseFailure("g", field, text); ok {
				require.Equal(t, field, strconv.FormatInt(n, 10))
			}
		}
		if d, err := ledger.ParseJob(text); err == nil {
			require.NotEmpty(t, d.Group)
		}
	})
}
