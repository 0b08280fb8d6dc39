// Command retryworker is a worker for tests of failovers. Its NOOP processor differs from the real
// one: a job with "fail":"retry" fails until it has been retried fail_times times, while the real
// one counts attempts. A failover may lose a start or an outcome; the job then runs again with a
// higher attempt. Retries are counted in the same step as the outcome, so they stay exact.
//
// It also serves the type PANIC: its jobs panic with their payload.
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
