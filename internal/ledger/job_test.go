package ledger_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

func TestParseJob(t *testing.T) {
	t.Parallel()
	blob := `g.1|SEND-EMAIL|3|1|0|2|70|8|900|1700000000123||42|1700000000000|00-aa-bb-01|{"a":"|","b":1}`
	d, err := ledger.ParseJob(blob)
	require.NoError(t, err)
	require.Equal(t, ledger.Job{
		Group: "g.1", Type: "SEND-EMAIL", Attempt: 3, Retries: 1, Throttles: 0, Losses: 2, Waits: "70|8|900", Since: time.UnixMilli(1700000000123),
		Ordinal: 42, Accepted: time.UnixMilli(1700000000000), Trace: "00-aa-bb-01", Payload: `{"a":"|","b":1}`,
		Queued: `42|1700000000000|00-aa-bb-01|{"a":"|","b":1}`,
	}, d)
	fair, rate, congestion := d.Waited()
	require.Equal(t, []time.Duration{70 * time.Millisecond, 8 * time.Millisecond, 900 * time.Millisecond}, []time.Duration{fair, rate, congestion})
	require.Equal(t, d.Queued, d.QueuedWithTrace(d.Trace))
	require.Equal(t, `42|1700000000000|new|{"a":"|","b":1}`, d.QueuedWithTrace("new"))
	require.Equal(t, `42|1700000000000||{"a":"|","b":1}`, d.QueuedWithTrace(""))
}

func TestParseJobRefuses(t *testing.T) {
	t.Parallel()
	for _, blob := range []string{
		"", "nonsense", "g|T|1|0|0|0|0|0|0|1||0|1|", "|T|1|0|0|0|0|0|0|1||0|1||1", "g||1|0|0|0|0|0|0|1||0|1||1",
		"g|T|x|0|0|0|0|0|0|1||0|1||1", "g|T|-1|0|0|0|0|0|0|1||0|1||1", "g|T|1|0|0|0|0|0|0|1||x|1||1", "g|T|1|0|0|0|0||0|1||0|1||1",
	} {
		_, err := ledger.ParseJob(blob)
		require.ErrorContains(t, err, "not a job", blob)
	}
}

// Whatever is read can be put together again.
func FuzzParseJob(f *testing.F) {
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1||1")
	f.Add("g|T|12|1|2|3|40|50|60|1700000000000|E|7|1700000000000|trace|{}")
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1|")
	f.Fuzz(func(t *testing.T, blob string) {
		d, err := ledger.ParseJob(blob)
		if err != nil {
			return
		}
		require.True(t, strings.HasPrefix(blob, d.Group+"|"+d.Type+"|"))
		require.True(t, strings.HasSuffix(blob, "|"+d.Queued))
		require.Equal(t, d.Queued, d.QueuedWithTrace(d.Trace))
		require.True(t, strings.HasSuffix(d.QueuedWithTrace("other"), "|other|"+d.Payload))
		d.Waited()
	})
}

// An entry's job is the same, wherever its blob is divided and whatever was read before it.
func FuzzParser(f *testing.F) {
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1||1", 23, "g|T|1|0|0|0|0|0|0|1||")
	f.Add("g|T|12|1|2|3|40|50|60|1700000000000|E|7|1700000000000|trace|{}", 36, "")
	f.Add("g|T|1|0|0|0|0|0|0|1||0|1||1", 3, "nonsense")
	f.Fuzz(func(t *testing.T, blob string, at int, before string) {
		at = max(0, min(at, len(blob)))
		var p ledger.Parser
		_ = p.Parse([]string{before, "0|1||1"}, new(ledger.Job))
		for range 2 {
			var d ledger.Job
			err := p.Parse([]string{blob[:at], blob[at:]}, &d)
			want, wantErr := ledger.ParseJob(ledger.EntryBlob([]string{blob[:at], blob[at:]}))
			require.Equal(t, wantErr, err)
			if err == nil {
				require.Equal(t, want, d)
			}
		}
	})
}

func BenchmarkParseJob(b *testing.B) {
	blob := "bench-group-7|NOOP|1|0|0|0|70|8|0|1700000000123||123456|1700000000000||" + `{"pad":"` + strings.Repeat("x", 190) + `"}`
	b.ReportAllocs()
	for b.Loop() {
		var d ledger.Job
		require.NoError(b, d.Parse(blob))
	}
}
