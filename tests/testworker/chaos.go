package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/bulkaction/bulkaction/processor"
)

type payload struct {
	// N is the job's index in the plan of its group. The ordinal can differ from it, because parts
	// of a group may arrive in any order.
	N            int   `json:"n"`
	MS           int   `json:"ms"`            // how long the job runs
	FailTimes    int   `json:"fail_times"`    // number of attempts that fail before one succeeds
	Permanent    bool  `json:"permanent"`     // the job fails permanently
	Crash        bool  `json:"crash"`         // the job kills its process
	IgnoreCancel bool  `json:"ignore_cancel"` // the job ignores the end of its context
	Value        int64 `json:"value"`         // the job's result
}

// chaos returns the processor of the tests under faults, for the type CHAOS: it does what the
// payload says, and records each run in a file of this process in a folder. No fault of Redis can
// change this file. With CHAOS_BATCH set, it runs the jobs in calls of up to 20.
func chaos(folder string) (processor.Runner, error) {
	path := filepath.Join(folder, os.Getenv("CHAOS_PROCESS"))
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the file of runs, in the folder CHAOS_FILES: %w", err)
	}
	if os.Getenv("CHAOS_BATCH") != "" {
		return processor.Batch("CHAOS", processor.BatchOptions{Size: 20}, func(
			_ context.Context, jobs []processor.BatchJob[json.RawMessage],
		) ([]processor.Outcome[any], error) {
			outcomes := make([]processor.Outcome[any], len(jobs))
			var all sync.WaitGroup
			for i, job := range jobs {
				all.Go(func() { outcomes[i].Result, outcomes[i].Err = process(job.Context(), file, job.Job) })
			}
			all.Wait()
			return outcomes, nil
		}), nil
	}
	return processor.Func("CHAOS", func(ctx context.Context, job processor.Job) (any, error) {
		return process(ctx, file, job)
	}), nil
}

func process(ctx context.Context, file *os.File, job processor.Job) (any, error) {
	var p payload
	if err := json.Unmarshal(job.Payload, &p); err != nil {
		return nil, processor.Permanent(processor.CodeInvalidPayload, err)
	}
	// note writes one line to the file with one write: lines of concurrent jobs do not mix, and the
	// line is stored even if the process dies right after it.
	note := func(what string) error {
		_, err := fmt.Fprintf(file, "%s %s.%d %d %d\n", what, job.Group, p.N, job.Attempt, time.Now().UnixNano())
		return err
	}
	if err := note("start"); err != nil {
		return nil, err
	}
	stop := ctx.Done()
	if p.IgnoreCancel {
		stop = nil
	}
	if p.MS > 0 {
		select {
		case <-time.After(time.Duration(p.MS) * time.Millisecond):
		case <-stop:
			return nil, errors.Join(ctx.Err(), note("cut"))
		}
	}
	switch {
	case p.Crash:
		return nil, errors.Join(note("crash"), syscall.Kill(os.Getpid(), syscall.SIGKILL))
	case p.Permanent:
		return nil, errors.Join(processor.Permanent("CHAOS_PERMANENT", errors.New(strconv.Itoa(p.N))), note("fail"))
	case job.Attempt <= p.FailTimes:
		return nil, errors.Join(processor.Retry("CHAOS_RETRY", nil), note("fail"))
	}
	if err := note("end"); err != nil {
		return nil, err
	}
	return map[string]int64{"n": int64(p.N), "value": p.Value}, nil
}
