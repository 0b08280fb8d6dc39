// Package attempt has the rules by which the end of an attempt decides what happens to its job: how
// a result is encoded, what a panic and a timeout count as, and how long a job waits before its
// next attempt. The worker and package bulktest share them.
package attempt

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/processor"
)

// MaxWait is the longest delay of a job that a downstream API or a processor may ask for. A longer
// Retry-After is cut to it.
const MaxWait = 24 * time.Hour

// AbandonDelay returns how long after its timeout a processor that ignores the end of its context
// is abandoned: a second, or as long as the timeout if that is shorter.
func AbandonDelay(timeout time.Duration) time.Duration { return min(time.Second, timeout) }

// TimeoutError returns the error of an attempt that ran longer than limit. Its job is retried, if
// it has retries left.
func TimeoutError(limit time.Duration) error {
	return processor.Retry(processor.CodeTimeout, fmt.Errorf("timed out after %s", limit))
}

// PanicError returns the error of an attempt whose processor has panicked. Its job is retried, if
// it has retries left. The error leaves the panic's value out, because it may contain a payload.
func PanicError() error {
	return processor.Retry("PANIC", errors.New("the processor panicked: see `processor panicked` in the worker's log"))
}

var noResult = []byte("null") // callers must not change it

// EncodeResult returns a processor's result as JSON without line breaks, with the character U+FFFD in
// place of bytes that are not UTF-8; nil and an empty json.RawMessage become null. Its errors are
// permanent: for a result that is not JSON, or that is larger than processor.MaxResultBytes.
func EncodeResult(result any) ([]byte, error) {
	var b []byte
	switch v := result.(type) {
	case nil:
		return noResult, nil
	case json.RawMessage:
		b = v
		if len(b) == 0 {
			return noResult, nil
		}
		if len(b) <= processor.MaxResultBytes {
			var line bytes.Buffer
			if err := json.Compact(&line, b); err != nil {
				return nil, processor.Permanent("INVALID_RESULT", errors.New("the processor's result is not JSON"))
			}
			b = line.Bytes()
		}
	default:
		var err error
		if b, err = json.Marshal(v); err != nil {
			return nil, processor.Permanent("INVALID_RESULT",
				fmt.Errorf("the processor's result can't be written as JSON: %T", v))
		}
	}
	if !utf8.Valid(b) { // of a json.RawMessage or of a MarshalJSON: a reader of all results would stop here
		b = bytes.ToValidUTF8(b, []byte(string(utf8.RuneError)))
	}
	if len(b) > processor.MaxResultBytes {
		return nil, processor.Permanent("RESULT_TOO_LARGE",
			fmt.Errorf("the processor's result has %d bytes, at most %d are kept", len(b), processor.MaxResultBytes))
	}
	return b, nil
}

// Rules are the settings that decide, after an attempt, whether the job is tried again and when.
type Rules struct {
	MaxRetries   int           // retries of the job
	MaxThrottles int           // throttles that a job may have; the next one fails it
	Backoff      time.Duration // wait before the first retry; it doubles with each further retry
	MaxBackoff   time.Duration // longest wait after an error or a throttle without Retry-After
}

// Next returns what happens to the job after an attempt with this verdict, and for how long the job
// then waits. Before a retry, and after a throttle without Retry-After, the worker shortens this by
// up to a tenth, at random, and Redis may choose a longer wait. retries and throttles are the
// numbers before the attempt. A job that would need another retry or throttle and has none left
// fails.
func (r Rules) Next(v processor.Verdict, retries, throttles int) (processor.Kind, time.Duration) {
	switch {
	case v.Kind == processor.Done:
		return processor.Done, 0
	case v.Kind == processor.Defer:
		return processor.Defer, min(v.After, MaxWait)
	case v.Kind == processor.Throttle && throttles < r.MaxThrottles && v.After > 0:
		return processor.Throttle, min(v.After, MaxWait)
	case v.Kind == processor.Throttle && throttles < r.MaxThrottles:
		return processor.Throttle, r.wait(throttles)
	case v.Kind == processor.RetryLater && retries < r.MaxRetries:
		return processor.RetryLater, r.wait(retries)
	}
	return processor.Fail, 0
}

// wait returns the wait before the next attempt, after tries earlier retries or throttles: Backoff,
// doubled tries times, at most MaxBackoff.
func (r Rules) wait(tries int) time.Duration {
	d := min(r.Backoff, r.MaxBackoff)
	for ; tries > 0 && d < r.MaxBackoff; tries-- {
		d = min(2*d, r.MaxBackoff)
	}
	return d
}
