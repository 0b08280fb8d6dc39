// Package processor defines the interface that the author of a job type implements, the job that it
// receives, and the errors with which it has the job retried, throttled, deferred or failed. The
// package hides how these errors become decisions of the system.
//
// A job is delivered at least once: it runs again when its worker dies or when the worker's report
// is lost. A processor must therefore be idempotent, or pass [Job.ID], which is the same in all
// attempts, to its downstream API as the idempotency key.
package processor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

// MaxResultBytes is the largest size of a job's result, encoded as JSON.
const MaxResultBytes = 64 << 10

// Job is one attempt that is handed to a processor.
type Job struct {
	Tenant  string          // the customer whose job it is
	Group   string          // the bulk action that the job is part of
	Ordinal int64           // the job's place in its group, from 0
	Type    string          // names the processor, such as SEND_EMAIL
	Payload json.RawMessage // as the producer sent it, at most 256 KiB; do not change it
	Key     string          // the producer's own name of the job; "": it gave none
	Attempt int             // from 1; grows each time the job becomes ready, also if no worker starts it
	Retries int             // retries after errors in this round; other deliveries don't count
	// RetriesLeft is how many retries the job has left; 0: an error that means "retry" now fails it
	// for good. Before the start, in Gated.Admit, it is not known, and 0.
	RetriesLeft int
	// LastError is the error with which an attempt of this round has ended last; nil: none has. A
	// deferral is no error. Before the start, in Gated.Admit, it is not known, and nil.
	LastError *AttemptError
	// AcceptedAt is when the job entered the fair queue in this round: when ingest accepted it or,
	// after the command retry, when it was requeued.
	AcceptedAt time.Time

	ctx context.Context //nolint:containedctx // see Context
}

// Context returns the context of a job in a call of [Batcher]: it ends with that of the call, or
// before, when the job's group is cancelled or its lease is lost.
func (j Job) Context() context.Context {
	if j.ctx == nil {
		return context.Background()
	}
	return j.ctx
}

// WithContext returns the job with the context that its method Context returns.
func (j Job) WithContext(ctx context.Context) Job {
	j.ctx = ctx
	return j
}

// AttemptError is the error with which an attempt of a job has ended.
type AttemptError struct {
	Code    string    // as in [Retry]; TIMEOUT, PANIC and WORKER_LOST for example come from the system
	Text    string    // at most 1 KiB
	Attempt int       // the attempt that has ended with it
	At      time.Time // when Redis recorded it
}

// ID returns the job's id, "group.ordinal". It is unique and the same in every attempt: use it as
// the idempotency key.
func (j Job) ID() string {
	return j.Group + "." + strconv.FormatInt(j.Ordinal, 10)
}

// Processor runs the jobs of one type.
//
// Process is called concurrently. It must return soon after ctx ends, which happens when the job's
// timeout is over, its group is cancelled, its lease is lost or the worker shuts down. After the
// timeout the attempt has failed with [CodeTimeout], whatever Process returns. When the worker
// shuts down, a result still makes the job done; after an error the job runs again and has used no
// retry.
//
// The result is any value that [encoding/json] can marshal, at most [MaxResultBytes] when encoded.
// A [json.RawMessage] is passed on unchanged; nil is an empty result. An error decides what
// follows: see [Retry], [Throttled], [Deferred] and [Permanent]. Any other error means "retry".
type Processor interface {
	// Type is the job type that the processor serves: 1 to 128 characters of A-Z a-z 0-9 . _ -
	Type() string
	Process(ctx context.Context, job Job) (any, error)
}

// Func returns a processor that runs the jobs of type typ by calling fn; nil if fn is nil, which a
// worker refuses at its start.
func Func(typ string, fn func(context.Context, Job) (any, error)) Processor {
	if fn == nil {
		return nil
	}
	return funcProcessor{typ, fn}
}

type funcProcessor struct {
	typ string
	fn  func(context.Context, Job) (any, error)
}

func (p funcProcessor) Type() string { return p.typ }

func (p funcProcessor) Process(ctx context.Context, job Job) (any, error) { return p.fn(ctx, job) }

// Typed returns a processor of the jobs of type typ, whose payload is the JSON of a P. fn gets the
// payload decoded, and returns the result. For a processor without a result, R is any and fn
// returns nil.
//
// A payload that is not the JSON of a P fails the job for good, with the code [CodeInvalidPayload]
// and the name of the wrong field. If P has a method Validate() error, its error does the same.
// Fields that P does not have are ignored, so that a producer may be newer than the worker.
//
// If fn is nil, Typed returns nil. The producer's side is client.Typed.
func Typed[P, R any](typ string, fn func(ctx context.Context, job Job, payload P) (R, error)) Processor {
	if fn == nil {
		return nil
	}
	return Func(typ, func(ctx context.Context, job Job) (any, error) {
		var payload P
		if err := decode(job.Payload, &payload); err != nil {
			return nil, Permanent(CodeInvalidPayload, err)
		}
		result, err := fn(ctx, job, payload)
		if err != nil {
			return nil, err
		}
		return result, nil
	})
}

// decode reads and validates a payload. Its errors contain no values, which may be personal; those
// of the payload's own methods may.
func decode[P any](data json.RawMessage, payload *P) error {
	if err := jsonscan.Decode("payload", data, payload); err != nil {
		return err
	}
	for _, v := range []any{*payload, payload} { // the method may have a pointer receiver
		if v, ok := v.(interface{ Validate() error }); ok {
			if err := v.Validate(); err != nil {
				return fmt.Errorf("payload: %w", err)
			}
			return nil
		}
	}
	return nil
}

// Gated is a Processor whose jobs need a permission that processes share, such as an account with a
// rate limit. The worker obtains the permission before it starts the job, so a job that waits for
// one takes no slot and uses no retry.
//
// Admit is called concurrently, before each start of a job, with the job that Process will get, but
// without its Tenant. It may wait some seconds; a processor that can't get a permission by then
// returns a [Deferred] error, and the job is not started. ctx ends when the job's group is
// cancelled, its lease is lost or the worker shuts down; the job is then given back. ctx has the
// timeout of the job's type, too. After any other error the job is started without a call of
// Process: the error decides about the job as an error of Process does. A nil Pass lets the job
// start without a permission.
type Gated interface {
	Processor
	Admit(ctx context.Context, job Job) (Pass, error)
}

// Pass is the permission for one attempt of a job.
type Pass interface {
	// Into returns the context that Process gets.
	Into(ctx context.Context) context.Context
	// Return gives the permission back and says how the attempt ended, by the error of Process; by
	// [context.Canceled] if it ended by a timeout that its group has made shorter than the type's.
	// It is called once for each pass, with a Deferred error if the job was not started after all.
	// It must not wait for a network, because its caller holds a slot.
	Return(err error)
}

// Limited is an optional interface of a Gated processor. With it, a worker reads ahead only as many
// jobs as may get a permission soon, and fetchers keep the ready stream of the type short, so that
// the order of the jobs stays fair. Availability is called often, and does no I/O.
type Limited interface {
	Availability() Availability
}

// Availability says how many permissions can be had.
type Availability struct {
	Free      int       // permissions that are free now; negative: not known or not bounded
	Next      time.Time // until then no job gets a permission; zero: not known
	PerSecond float64   // permissions a second of all processes together; +Inf: not bounded
}

// Run is for tests of processors: it runs one attempt of a job much as a worker does, and returns
// what Process returns. If p is Gated, it first calls Admit, whose error it returns, and calls the
// Return of the Pass after Process.
func Run(ctx context.Context, p Processor, job Job) (result any, err error) {
	gated, ok := p.(Gated)
	if !ok {
		return p.Process(ctx, job)
	}
	pass, err := gated.Admit(ctx, job)
	if err != nil {
		return nil, err
	}
	if pass != nil {
		ctx = pass.Into(ctx)
		defer func() { pass.Return(err) }()
	}
	return p.Process(ctx, job)
}

// Handler runs one attempt of a job, as Processor.Process does.
type Handler func(ctx context.Context, job Job) (result any, err error)

// Middleware adds something to all attempts, such as a log line, a span or a check: it returns a
// Handler that calls next. It may change the context, the result and the error.
type Middleware func(next Handler) Handler

// Use returns p with middleware around its Process; the first one is called first. If p is Gated,
// the result is, too; if p is also Limited, the result is. Admit is not wrapped.
func Use(p Processor, middleware ...Middleware) Processor {
	if len(middleware) == 0 {
		return p
	}
	handle := Handler(p.Process)
	for i := len(middleware) - 1; i >= 0; i-- {
		handle = middleware[i](handle)
	}
	u := used{p, handle}
	gated, ok := p.(Gated)
	if !ok {
		return u
	}
	limited, ok := p.(Limited)
	if !ok {
		return usedGated{u, gated}
	}
	return usedLimited{usedGated{u, gated}, limited}
}

// used is a processor with middleware.
type used struct {
	Processor
	handle Handler
}

func (u used) Process(ctx context.Context, job Job) (any, error) { return u.handle(ctx, job) }

type usedGated struct {
	used
	gated Gated
}

func (u usedGated) Admit(ctx context.Context, job Job) (Pass, error) { return u.gated.Admit(ctx, job) }

type usedLimited struct {
	usedGated
	limited Limited
}

func (u usedLimited) Availability() Availability { return u.limited.Availability() }

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
