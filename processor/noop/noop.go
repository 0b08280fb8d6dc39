// Package noop is the processor of the job type NOOP, for experiments and benchmarks: it does
// nothing, or sleeps, or fails in the way that its payload asks for. It can kill its own process,
// so a worker serves NOOP only if its configuration says so.
package noop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
	"github.com/bulkaction/bulkaction/processor"
)

// Type is the job type that the processor serves.
const Type = "NOOP"

// These are the error codes of the failures that a payload can ask for. A throttle has the code
// [processor.CodeThrottled].
const (
	CodeRetry     = "NOOP_RETRY"
	CodePermanent = "NOOP_PERMANENT"
)

// maxSleep is the longest sleep that a payload may ask for. It prevents the overflow of a
// time.Duration. The job's timeout ends the sleep much earlier.
const maxSleep = 24 * time.Hour

// Processor runs NOOP jobs. The payload is
//
//	{"sleep_ms"?: n, "fail"?: "retry"|"permanent"|"throttle"|"defer"|"crash",
//	 "fail_times"?: n, "result"?: any JSON}
//
// An empty payload makes the job done at once, without a result. Other members are ignored. The
// processor first sleeps. With "fail", it then fails in each attempt up to number fail_times, or in
// every attempt if fail_times is absent; "defer" defers the job by 10 ms, and "crash" ends the
// whole process like kill -9. If the processor does not fail, it returns "result". The zero value
// is ready for use.
type Processor struct {
	// Crash ends the process at once, without any clean-up; nil means os.Exit(137). Tests set it.
	Crash func()
}

type payload struct {
	SleepMS   int64           `json:"sleep_ms"`
	Fail      string          `json:"fail"`
	FailTimes *int            `json:"fail_times"` // nil: every attempt fails
	Result    json.RawMessage `json:"result"`
}

// Type is NOOP.
func (Processor) Type() string { return Type }

// Process does what the payload asks for. A payload that is not valid is the permanent error
// INVALID_PAYLOAD.
func (p Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	if asksNothing(job.Payload) {
		return nil, nil
	}
	want, err := parse(job.Payload)
	if err != nil {
		return nil, processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("read NOOP payload: %w", err))
	}
	if err := sleep(ctx, time.Duration(want.SleepMS)*time.Millisecond); err != nil {
		return nil, fmt.Errorf("sleep %d ms: %w", want.SleepMS, err)
	}
	if want.Fail != "" && (want.FailTimes == nil || job.Attempt <= *want.FailTimes) {
		return nil, p.fail(want.Fail)
	}
	if want.Result == nil {
		return nil, nil
	}
	return want.Result, nil
}

// asksNothing returns true for a payload that makes the job done at once: an empty one, or one with
// only "pad", a text that makes it larger. It decodes no JSON, because benchmarks send millions of
// such jobs (see BenchmarkEmptyPayload).
func asksNothing(payload []byte) bool {
	switch string(payload) {
	case "", "{}", "null":
		return true
	}
	pad, padded := bytes.CutPrefix(payload, []byte(`{"pad":"`))
	pad, ended := bytes.CutSuffix(pad, []byte(`"}`))
	return padded && ended && jsonscan.Plain(pad, 0) == len(pad)
}

func parse(raw []byte) (payload, error) {
	var p payload
	if err := jsonscan.Decode("", raw, &p); err != nil {
		return p, err
	}
	switch p.Fail {
	case "", "retry", "permanent", "throttle", "defer", "crash":
	default:
		return p, errors.New("fail is not one of retry, permanent, throttle, defer, crash")
	}
	if p.SleepMS < 0 || p.SleepMS > maxSleep.Milliseconds() {
		return p, fmt.Errorf("sleep_ms is not between 0 and %d", maxSleep.Milliseconds())
	}
	if p.FailTimes != nil && *p.FailTimes < 0 {
		return p, errors.New("fail_times is negative")
	}
	return p, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return nil
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var errAsked = errors.New("the payload asked for this failure")

func (p Processor) fail(how string) error {
	switch how {
	case "permanent":
		return processor.Permanent(CodePermanent, errAsked)
	case "throttle":
		return processor.Throttled(0, errAsked)
	case "defer":
		return processor.Deferred(10*time.Millisecond, errAsked.Error())
	case "crash":
		if p.Crash == nil {
			os.Exit(137) // the exit code that a shell shows after kill -9; runs no deferred function
		}
		p.Crash()
	}
	return processor.Retry(CodeRetry, errAsked)
}
