// Package noop is the processor of the job type NOOP, for drills and benchmarks: it does nothing,
// or sleeps, or fails in the way that its payload asks for. It can kill its own process, so a
// worker serves it only where configuration asks for it.
package noop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/processor"
)

// Type is the job type that the processor serves.
const Type = "NOOP"

// Codes of the failures that a payload can ask for; a throttle has [processor.CodeThrottled].
const (
	CodeRetry     = "NOOP_RETRY"
	CodePermanent = "NOOP_PERMANENT"
)

// maxSleep keeps a sleep from overflowing a time.Duration; the job's time-out ends it long before.
const maxSleep = 24 * time.Hour

// Processor serves NOOP. Its payload is
//
//	{"sleep_ms"?: n, "fail"?: "retry"|"permanent"|"throttle"|"crash", "fail_times"?: n,
//	 "result"?: any JSON}
//
// and an empty one is done at once, without a result; other members count for nothing. The sleep
// comes first. With fail it fails as long as the attempt is not above fail_times, or always where
// that is absent; crash ends the whole process, as kill -9 would. Else the result is handed back.
// The zero value is ready for use.
type Processor struct {
	// Crash ends the process at once, without any clean-up; nil stands for os.Exit(137).
	// Tests set it.
	Crash func()
}

type payload struct {
	SleepMS   int64           `json:"sleep_ms"`
	Fail      string          `json:"fail"`
	FailTimes *int            `json:"fail_times"` // nil: always
	Result    json.RawMessage `json:"result"`
}

// Type is NOOP.
func (Processor) Type() string { return Type }

// Process does what the payload asks for; one that makes no sense is a permanent INVALID_PAYLOAD.
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

// asksNothing knows payloads that ask for nothing without decoding them, since benchmarks send
// millions: empty ones, and those with nothing but a pad, a text that makes them larger.
func asksNothing(payload []byte) bool {
	switch string(payload) {
	case "", "{}", "null":
		return true
	}
	pad, padded := bytes.CutPrefix(payload, []byte(`{"pad":"`))
	pad, ended := bytes.CutSuffix(pad, []byte(`"}`))
	return padded && ended && !slices.ContainsFunc(pad, func(c byte) bool { return c < ' ' || c == '"' || c == '\\' })
}

func parse(raw []byte) (payload, error) {
	var p payload
	if err := json.Unmarshal(raw, &p); err != nil {
		return p, err
	}
	switch p.Fail {
	case "", "retry", "permanent", "throttle", "crash":
	default:
		return p, errors.New("fail is not one of retry, permanent, throttle, crash")
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
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
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
	case "crash":
		p.crash()
	}
	return processor.Retry(CodeRetry, errAsked)
}

func (p Processor) crash() {
	if p.Crash != nil {
		p.Crash()
		return
	}
	os.Exit(137) // what a shell shows after kill -9; runs no deferred function
}
