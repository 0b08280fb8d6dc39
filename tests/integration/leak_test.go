package integration

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/dev"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestNothingLeaks: all roles run in this process, and are started and stopped five times under
// load. At the end no goroutine and no connection is left, and all accepted jobs are done. It does
// not run in parallel, because goroutines of other tests would be counted too.
func TestNothingLeaks(t *testing.T) {
	server := redistest.Server(t)
	rdb := server.Client()
	before := goleak.IgnoreCurrent()
	const rounds = 5
	var accepted []string
	for i := range rounds {
		ctx, stop := context.WithCancel(t.Context())
		started, ended := make(chan string, 1), make(chan int, 1)
		go func() {
			ended <- dev.Run(ctx, dev.Options{
				RedisURL: server.URL(), Addr: "127.0.0.1:0", Log: t.Output(), Started: func(addr, _ string) { started <- addr },
				Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0", "BULKACTION_LOG_LEVEL=error", "BULKACTION_WORKER_TIMEOUT=100ms", "BULKACTION_REDIS_POOL_MIN_IDLE=1"},
			})
		}()
		var api *client.API
		select {
		case addr := <-started:
			api = client.NewAPI("http://" + addr)
		case code := <-ended:
			require.Failf(t, "the process ended before it was ready", "exit code %d", code)
		}
		for n := range 4 {
			g := client.Submission{ID: fmt.Sprintf("g-%d-%d", i, n), Type: "NOOP", Jobs: jobs(25, `{"sleep_ms":20}`), Seal: true}
			_, err := api.Submit(ctx, g)
			require.NoError(t, err)
			accepted = append(accepted, g.ID)
		}
		for n := 0; i == rounds-1 && n < len(accepted); n++ {
			g, err := api.Wait(ctx, accepted[n])
			require.NoError(t, err)
			require.EqualValues(t, 25, g.Counts.Done, accepted[n])
		}
		stop()
		require.Equal(t, 0, <-ended)
	}
	http.DefaultClient.CloseIdleConnections()
	require.NoError(t, goleak.Find(before))
	require.Zero(t, connections(t, rdb), "connections that were not closed")
}
