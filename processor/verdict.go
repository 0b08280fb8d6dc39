package processor

import (
	"context"
	"errors"
	"strings"
	"time"
	"unicode/utf8"
)

// General codes of failed attempts; a processor may use codes of its own. Failures are counted by
// code, so a code names a cause, never a single job: 1 to 64 characters of A-Z a-z 0-9 . _ -
const (
	CodeError          = "ERROR"           // an error without a code, or with one that is not valid
	CodeTimeout        = "TIMEOUT"         // the job's timeout was over
	CodeThrottled      = "API_THROTTLED"   // the downstream API asked to wait
	CodeInvalidPayload = "INVALID_PAYLOAD" // the payload is not what the processor needs
	CodeResourceBusy   = "RESOURCE_BUSY"   // what the job needs, e.g. an account, is busy
)

const (
	maxCodeBytes    = 64
	maxMessageBytes = 1 << 10
)

// Kind is the decision about a job after an attempt.
type Kind int

// These are the kinds of verdicts.
const (
	Done       Kind = iota // the job is done
	RetryLater             // it runs again after a wait and uses a retry; it fails if none is left
	Throttle               // it runs again after the time that the downstream API asked for; no retry is used
	Fail                   // it failed for good
	Defer                  // it runs again when what it needs may be free; neither a retry nor a throttle is used
)

// String returns the kind in lower-case words, for log attributes.
func (k Kind) String() string {
	if k < Done || k > Defer {
		return "unknown"
	}
	return [...]string{Done: "done", RetryLater: "retry", Throttle: "throttle", Fail: "fail", Defer: "defer"}[k]
}

// Verdict is the decision that follows from the error of an attempt, with its code and text.
type Verdict struct {
	Kind Kind
	Code string // empty for Done, otherwise a valid code
	// After is how long the job waits: for Throttle as the downstream API asked, 0 if it named no
	// time; for Defer as the processor asked, above 0.
	After   time.Duration
	Message string // the error's text, valid UTF-8 of at most 1 KiB
}

// Retry marks err as transient: the job runs again after a wait, as long as it has retries left. If
// err is nil, Retry still returns an error; its text is the code.
func Retry(code string, err error) error {
	return &answer{kind: RetryLater, code: code, cause: err}
}

// Throttled says that the downstream API asked to wait: the job runs again after this time, at most
// a day, and uses no retry, but fails if it has had as many throttles as workers allow (100 by
// default). With after <= 0 the system chooses the time. The code is [CodeThrottled]. If err is
// nil, Throttled still returns an error; its text is the code.
func Throttled(after time.Duration, err error) error {
	return &answer{kind: Throttle, code: CodeThrottled, after: max(after, 0), cause: err}
}

// Deferred says that something the job needs is busy, such as an account, and why: the job runs
// again after this time, at most a day, as often as needed, and uses neither a retry nor a
// throttle. With less than a millisecond it waits a second. The code is [CodeResourceBusy]; people
// read the reason as the error's text.
func Deferred(after time.Duration, reason string) error {
	if after = after.Truncate(time.Millisecond); after <= 0 {
		after = time.Second
	}
	a := &answer{kind: Defer, code: CodeResourceBusy, after: after}
	if reason != "" {
		a.cause = errors.New(reason)
	}
	return a
}

// Permanent marks err as one that another attempt cannot change: the job fails and is not retried
// automatically. If err is nil, Permanent still returns an error; its text is the code.
func Permanent(code string, err error) error {
	return &answer{kind: Fail, code: code, cause: err}
}

// answer is the error type of Retry, Throttled, Deferred and Permanent: it carries the verdict.
type answer struct {
	kind  Kind
	code  string
	after time.Duration
	cause error
}

func (a *answer) Error() string {
	if a.cause == nil {
		return a.code
	}
	return a.cause.Error()
}

func (a *answer) Unwrap() error { return a.cause }

// Classify turns the error that Process returned into a verdict. It unwraps errors; the outermost
// [Retry], [Throttled], [Deferred] or [Permanent] decides. If there is none,
// [context.DeadlineExceeded] is a retry with [CodeTimeout], any other error is a retry with
// [CodeError], and nil is done. An invalid code is replaced by [CodeError].
func Classify(err error) Verdict {
	if err == nil {
		return Verdict{Kind: Done}
	}
	v := Verdict{Kind: RetryLater, Code: CodeError, Message: boundedText(err.Error())}
	var a *answer
	switch {
	case errors.As(err, &a):
		v.Kind, v.After = a.kind, a.after
		if validCode(a.code) {
			v.Code = a.code
		}
	case errors.Is(err, context.DeadlineExceeded):
		v.Code = CodeTimeout
	}
	return v
}

func validCode(code string) bool {
	const allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
	return code != "" && len(code) <= maxCodeBytes && strings.Trim(code, allowed) == ""
}

// boundedText returns s as valid UTF-8 of at most maxMessageBytes bytes. It splits no character.
func boundedText(s string) string {
	if len(s) > maxMessageBytes+utf8.UTFMax {
		s = s[:maxMessageBytes+utf8.UTFMax] // avoids copying a huge text
	}
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	end := min(len(s), maxMessageBytes)
	for end < len(s) && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}
