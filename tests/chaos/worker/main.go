// Command worker is the chaos harness's worker: its one processor, CHAOS, writes down what it runs
// in a file of its process, which no fault of Redis can touch, and does what the payload asks for.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// payload is what a job is to do.
type payload struct {
	// its number among the jobs of its group as planned; pieces of a group may come in any order
	N         int   `json:"n"`
	MS        int   `json:"ms"`         // how long it runs
	FailTimes int   `json:"fail_times"` // attempts that fail before one succeeds
	Permanent bool  `json:"permanent"`  // it fails for good
	Crash     bool  `json:"crash"`      // it kills its process
	Deaf      bool  `json:"deaf"`       // it goes on when it is told to stop
	Value     int64 `json:"value"`      // its result
}

func main() {
	// CHAOS_FILES is the folder, CHAOS_PROCESS this process's name in it.
	path := filepath.Join(os.Getenv("CHAOS_FILES"), os.Getenv("CHAOS_PROCESS"))
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		fmt.Fprintln(os.Stderr, "open the file of runs, in the folder CHAOS_FILES:", err)
		os.Exit(1)
	}
	run.Worker(processor.Func("CHAOS", func(ctx context.Context, job processor.Job) (any, error) {
		return process(ctx, file, job)
	}))
}

func process(ctx context.Context, file *os.File, job processor.Job) (any, error) {
	var p payload
	if err := json.Unmarshal(job.Payload, &p); err != nil {
		return nil, processor.Permanent(processor.CodeInvalidPayload, err)
	}
	// One write a line: lines of jobs that run at once don't mix, and what is written
	// survives the process.
	note := func(what string) error {
		_, err := fmt.Fprintf(file, "%s %s.%d %d %d\n", what, job.Group, p.N, job.Attempt, time.Now().UnixNano())
		return err
	}
	if err := note("start"); err != nil {
		return nil, err
	}
	stop := ctx.Done()
	if p.Deaf {
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
