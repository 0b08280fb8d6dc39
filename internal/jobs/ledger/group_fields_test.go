package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// TestGroupFields: Encode returns the hash fields of GroupFields: lane, name and base_priority
// always, the others only if they are set (max_retries and total may be set to 0). Times and
// durations are in ms.
func TestGroupFields(t *testing.T) {
	t.Parallel()
	require.Equal(t, map[string]string{"lane": "normal", "name": "", "base_priority": "0"}, (&ledger.GroupFields{Lane: "normal"}).Encode())
	retries, at, threshold, total := 0, time.UnixMilli(1_700_000_000_000), 0.25, int64(0)
	require.Equal(t, map[string]string{
		"lane": "high", "name": "Mailing", "base_priority": "-1.5", "max_retries": "0", "job_timeout": "1500", "run_at": "1700000000000",
		"failure_threshold": "0.25", "total": "0", "aggregate": "[]",
	}, (&ledger.GroupFields{
		Lane: "high", Name: "Mailing", BasePriority: -1.5, MaxRetries: &retries, JobTimeout: 1500 * time.Millisecond, RunAt: &at,
		FailureThreshold: &threshold, Total: &total, Aggregate: "[]",
	}).Encode())
}
