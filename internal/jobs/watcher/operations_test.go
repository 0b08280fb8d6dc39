package watcher_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/jobs/operations"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestWatcherCarriesOutOperations: the leader of partition 0 does, and after it the next one.
func TestWatcherCarriesOutOperations(t *testing.T) {
	w := stagetest.Parallel(t, 2)
	start := func(id string) (stop func()) {
		log := activity.New(w.Conn.Cmd, w.Space, 0, w.Tel.Log)
		return run(w, watcher.Config{Operations: operations.New(w.Conn, w.Space, w.Tel.Log, log)}, id)
	}
	w.Jobs("g", "T", 1)
	ctx := stagetest.Trusted(t)
	for process, do := range map[string]string{"a": api.OpPause, "b": api.OpResume} {
		stop := start(process)
		_, err := w.Store.StartOperation(ctx, do, api.OperationRequest{Do: do, Filter: api.OperationFilter{All: true}})
		require.NoError(t, err)
		w.Await("the operation", func() bool {
			o, err := w.Store.Operation(ctx, do)
			require.NoError(t, err)
			return o.State == api.OperationCompleted && o.Matched == 1
		})
		stop()
	}
}
