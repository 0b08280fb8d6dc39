package groups

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// TestJobViewHasTheTrace: the view of a failed job has the trace id of its error. It has none if
// there is no error, or if the error's trace is empty or malformed.
func TestJobViewHasTheTrace(t *testing.T) {
	for trace, want := range map[string]string{
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01": "0af7651916cd43dd8448eb211c80319c", "": "", "odd": "",
	} {
		j := jobView("g", 7, ledger.JobStatus{State: "F!", Errors: []ledger.JobError{{Code: "E", Trace: trace}}})
		require.Equal(t, want, j.TraceID)
	}
	require.Empty(t, jobView("g", 7, ledger.JobStatus{State: "F!"}).TraceID)
}

// TestAddStatsAddsEachNumber: addStats adds each int64 field of TypeStats: the numbers of a type
// are summed over the partitions.
func TestAddStatsAddsEachNumber(t *testing.T) {
	var one, sum api.TypeStats
	for _, f := range reflect.ValueOf(&one).Elem().Fields() {
		if f.Kind() == reflect.Int64 {
			f.SetInt(3)
		}
	}
	addStats(&sum, one)
	addStats(&sum, one)
	for field, f := range reflect.ValueOf(sum).Fields() {
		if f.Kind() == reflect.Int64 {
			require.EqualValues(t, 6, f.Int(), field.Name)
		}
	}
}
