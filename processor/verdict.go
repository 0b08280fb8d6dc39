package processor

import (
	"context"
	"errors"
	"strings"
	"time"
	"unicode/utf8"
)

// Codes that say why an attempt failed, where no other code says it better. Failures are counted by
// code, so a code names a cause, never a single job: 1 to 64 characters of A-Z a-z 0-9 . _ -
const (
	CodeError          = "ERROR"           // an error without a code, or with one that is not valid
	CodeTimeout        = "TIMEOUT"         // the job's time was up
	CodeThrottled      = "API_THROTTLED"   // the partner said slow down
	CodeInvalidPayload = "INVALID_PAYLOAD" // the payload is not what the processor needs
)

const (
	maxCodeBytes    = 64
	maxMessageBytes = 1 << 10
)

// Kind is what becomes of a job after an attempt.
type Kind int

// Kinds of verdicts.
const (
	Done       Kind = iota // the job is done
	RetryLater             // it runs again after a wait, and one of its retries is used
	Throttle               // it runs again when the partner allows it; no retry is used
	Fail                   // it failed for good
)

// String is the kind in lower-case words, as for a log attribute.
func (k Kind) String() string {
	switch k {
	case Done:
		return "done"
	case RetryLater:
		return "retry"
	case Throttle:
		return "throttle"
	case Fail:
		return "fail"
	}
	return "unknown"
}

// Verdict is the decision that an attempt's error stands for.
type Verdict struct {
	Kind    Kind
	Code    string        // empty when done, else valid
	After   time.Duration // with Throttle: how long the partner asked to wait, 0 when it did not say
	Message string        // the error's text, valid UTF-8 of at most 1 KiB
}

// Retry marks err as transient: the job runs again after a wait, as long as it has retries left. A
// nil err is an error still, whose text is the code.
func Retry(code string, err error) error {
	return &answer{kind: RetryLater, code: code, cause: err}
}

// Throttled says that the partner asked to slow down: the job runs again after that time and uses
// no retry. With after <= 0 the partner did not say how long, and the engine chooses. The code is
// [CodeThrottled]; a nil err is an error still, whose text is the code.
func Throttled(after time.Duration, err error) error {
	return &answer{kind: Throttle, code: CodeThrottled, after: max(after, 0), cause: err}
}

// Permanent marks err as one that no further attempt can mend: the job has failed and is never
// retried by itself. A nil err is an error still, whose text is the code.
func Permanent(code string, err error) error {
	return &answer{kind: Fail, code: code, cause: err}
}

// answer is an error that carries its verdict.
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

// Classify turns the error that Process returned into a verdict. It looks through wrapped errors,
// and the outermost of [Retry], [Throttled] and [Permanent] decides. Without one,
// [context.DeadlineExceeded] is a retry with [CodeTimeout], any other error a retry with
// [CodeError], and nil is done.
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
	if code == "" || len(code) > maxCodeBytes {
		return false
	}
	for i := range len(code) {
		c := code[i]
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

// boundedText makes any text valid UTF-8 of at most maxMessageBytes, without splitting a character.
func boundedText(s string) string {
	if len(s) > maxMessageBytes+utf8.UTFMax {
		s = s[:maxMessageBytes+utf8.UTFMax] // so that a huge text costs no huge copy
	}
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	if len(s) <= maxMessageBytes {
		return s
	}
	end := maxMessageBytes
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}
