// Command retryworker is a worker for tests of failovers. Its processor serves NOOP, but counts
// retries where NOOP counts attempts: a job with "fail":"retry" fails until it has been retried
// fail_times times. A failover may lose a start or an outcome, and the job then runs again with a
// higher attempt. Retries are counted in the same step as the outcome, so they stay exact.
//
// It also serves PANIC: such a job panics with its payload.
package main

import (
	"context"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/noop"
	"github.com/bulkaction/bulkaction/run"
)

var panicking = processor.Func("PANIC", func(_ context.Context, job processor.Job) (any, error) {
	panic(string(job.Payload))
})

func main() {
	run.Worker(panicking, processor.Func(noop.Type, func(ctx context.Context, job processor.Job) (any, error) {
		job.Attempt = job.Retries + 1
		return noop.Processor{}.Process(ctx, job)
	}))
}
