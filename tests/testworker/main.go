// Command testworker is a worker for tests. With CHAOS_FILES, a folder, it serves the type CHAOS of
// the tests under faults. Otherwise it serves NOOP and PANIC. Its NOOP processor differs from the
// real one: a job with "fail":"retry" fails until it has been retried fail_times times, while the
// real one counts attempts. A failover may lose a start or an outcome; the job then runs again with
// a higher attempt. Retries are counted in the same step as the outcome, so they stay exact. Jobs
// of the type PANIC panic with their payload.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/noop"
	"github.com/bulkaction/bulkaction/run"
)

var panicking = processor.Func("PANIC", func(_ context.Context, job processor.Job) (any, error) {
	panic(string(job.Payload))
})

var retrying = processor.Func(noop.Type, func(ctx context.Context, job processor.Job) (any, error) {
	job.Attempt = job.Retries + 1
	return noop.Processor{}.Process(ctx, job)
})

func main() {
	folder := os.Getenv("CHAOS_FILES")
	if folder == "" {
		run.Worker(panicking, retrying)
		return
	}
	proc, err := chaos(folder)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	run.Worker(proc)
}
