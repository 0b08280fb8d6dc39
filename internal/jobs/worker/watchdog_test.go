package worker_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestJobsThatWaitBehindSlowJobsAreReleased: after many quick jobs, a worker prefetches slow ones
// as if they were quick too. The ones that wait for a slot are released.
func TestJobsThatWaitBehindSlowJobsAreReleased(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	slow := newBlockingProcessor("SLOW")
	cfg := config()
	cfg.Count = 2
	stop := w.Run(newWorker(w, cfg, processorReturning("QUICK", nil, nil), slow))
	w.Jobs("quick", "QUICK", 500)
	w.Admit("QUICK")
	w.AwaitCounts("quick", api.Counts{Accepted: 500, Done: 500})

	const jobs = 60
	w.Jobs("slow", "SLOW", jobs)
	w.Admit("SLOW")
	for range cfg.Count {
		stagetest.Receive(t, slow.started, "a slow job")
	}
	w.Await("the jobs without a slot to be released or left ready", func() bool {
		c := w.Counts("slow")
		return c.InFlight == int64(cfg.Count) && c.NonReady > 0
	})
	c := w.Counts("slow")
	require.EqualValues(t, jobs-cfg.Count, c.NonReady+c.Ready)
	require.Zero(t, w.Group("slow").Retries)

	// A second process runs the 58 jobs that were released or never read. The first one ends only
	// the two that it had begun.
	w.Feed(stagetest.Patience, "SLOW")
	w.Run(newWorker(w, config(), processorReturning("SLOW", nil, nil)))
	w.Await("the others to be done", func() bool { return w.Counts("slow").Done == jobs-int64(cfg.Count) })
	require.Empty(t, slow.started, "the first process began none of them")
	for range cfg.Count {
		slow.end <- nil
	}
	w.AwaitCounts("slow", api.Counts{Accepted: jobs, Done: jobs})
	stop()
}
