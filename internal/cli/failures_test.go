package cli

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func TestMapRows(t *testing.T) {
	m := api.JobMap{Jobs: 8200}
	for i := range int64(82) {
		m.Buckets = append(m.Buckets, api.MapBucket{From: 100 * i, To: 100*i + 99, Waiting: 100})
	}
	m.Buckets[0] = api.MapBucket{Done: 99, Failed: 1}
	m.Buckets[1] = api.MapBucket{Done: 1, Failed: 99}
	m.Buckets[2] = api.MapBucket{Done: 50, InFlight: 50}
	m.Buckets[3] = api.MapBucket{}
	m.Buckets[81] = api.MapBucket{Cancelled: 1}
	var out bytes.Buffer
	rows := newTable(&out)
	mapRows(rows, m)
	require.NoError(t, rows.flush())
	require.Contains(t, out.String(), "0       fFI?WWWW")
	require.Contains(t, out.String(), "8,000   WC\n")
}

func TestSummaryRows(t *testing.T) {
	var out bytes.Buffer
	rows := newTable(&out)
	summaryRows(rows, api.FailureSummary{Total: 12_000, Seen: 5000, Codes: []api.FailureCode{{
		Code: "GONE", Count: 12_000, Fingerprints: []api.FailureFingerprint{{
			Text: "no mailbox <n>", Count: 12_000, Sampled: 5000,
			Samples: []api.FailureSample{{Ordinal: 7, Error: "no mailbox 7\x1b[31m"}, {Ordinal: 8}},
		}},
	}}})
	require.NoError(t, rows.flush())
	require.Contains(t, out.String(), "about 12,000   no mailbox <n>\n")
	require.Contains(t, out.String(), "job 7: no mailbox 7 [31m\n")
}
