package push

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	// maxAnswerBytes is how much of a response body is read. If the body is longer, its connection
	// is not used again, unless it is one of HTTP/2.
	maxAnswerBytes = 64 << 10
	// throttledWait is how long a job waits after a 429 without Retry-After. Usually its account,
	// too, is not used during this time.
	throttledWait = time.Minute
)

// answer is what follows from the reply of a push service, or from its absence, for the job (err)
// and for the account (outcome).
type answer struct {
	status  int // 0: no answer
	outcome credential.Outcome
	err     error // nil: the message was accepted
}

// reply is an answer as it came.
type reply struct {
	platform string
	status   int
	reason   string // a known word of the platform, such as BadDeviceToken; else ""
	header   http.Header
}

func (r reply) error() error {
	word := r.reason
	if word == "" {
		word = http.StatusText(r.status)
	}
	return fmt.Errorf("push by %s: status %d %s", r.platform, r.status, word)
}

func (r reply) accepted() answer {
	return answer{status: r.status, outcome: credential.Outcome{Kind: credential.Success}}
}

// permanent returns the answer for a reply about the recipient or the message: the job fails for
// good, and nothing is known about the account.
func (r reply) permanent(code string) answer {
	return answer{status: r.status, err: processor.Permanent(code, r.error())}
}

// failed is an answer about the service or the account.
func (r reply) failed(code string) answer {
	return answer{
		status: r.status, err: processor.Retry(code, r.error()),
		outcome: credential.Outcome{Kind: credential.Failure},
	}
}

func (r reply) throttled() answer {
	after, given := egress.RetryAfter(r.header.Get("Retry-After"), time.Now())
	if !given {
		after = throttledWait
	}
	return answer{
		status: r.status, err: processor.Throttled(after, r.error()),
		outcome: credential.Outcome{Kind: credential.Throttled, After: after},
	}
}

// classify returns the answer for a reply by its status alone. Each platform calls it for replies
// to which none of its own rules applies.
//
//	2xx       accepted
//	401, 403  retry: the service refuses the account's credential
//	413       permanent: PUSH_TOO_LARGE
//	429       throttled
//	other 4xx permanent: PUSH_INVALID_ARGUMENT
//	others    retry
func (r reply) classify() answer {
	switch {
	case r.status/100 == 2:
		return r.accepted()
	case r.status == http.StatusTooManyRequests:
		return r.throttled()
	case r.status == http.StatusUnauthorized, r.status == http.StatusForbidden:
		return r.failed(CodeCredentialRefused)
	case r.status == http.StatusRequestEntityTooLarge:
		return r.permanent(CodeTooLarge)
	case r.status/100 == 4:
		return r.permanent(CodeInvalidArgument)
	}
	return r.failed(statusCode(r.status))
}

func statusCode(status int) string { return "PUSH_" + strconv.Itoa(status) }

// unanswered returns the answer for a call that got no reply: the job is retried, and the account's
// outcome is a failure, unless the job was cancelled or the worker stops. The text of err must not
// name the recipient.
func unanswered(ctx context.Context, platform string, err error) answer {
	failure := credential.Outcome{Kind: credential.Failure}
	switch {
	case errors.Is(ctx.Err(), context.Canceled): // the job was cancelled or the worker stops
		return answer{err: fmt.Errorf("push by %s: %w", platform, ctx.Err())}
	case ctx.Err() != nil:
		return answer{err: fmt.Errorf("push by %s: %w", platform, ctx.Err()), outcome: failure}
	}
	return answer{err: processor.Retry(CodeUnreachable, fmt.Errorf("push by %s: %w", platform, err)), outcome: failure}
}

// kindOnly returns an error that only says what kind of thing failed. err itself may have the host
// in it, which is part of the endpoint and must not be logged.
func kindOnly(err error) error {
	var (
		name        *net.DNSError
		certificate *tls.CertificateVerificationError
	)
	switch {
	case errors.As(err, &name):
		return errors.New("the endpoint's host is not known")
	case errors.As(err, &certificate):
		return errors.New("the endpoint's certificate is not valid")
	}
	return errors.New("the connection to the endpoint failed")
}

// read returns at most maxAnswerBytes of a response's body.
func read(body io.Reader) []byte {
	// A read error is ignored: the status is known without the body, and only the reason is
	// missing.
	content, _ := io.ReadAll(io.LimitReader(body, maxAnswerBytes))
	return content
}

// discard reads at most maxAnswerBytes of a response's body, so that its connection can be used
// again.
func discard(body io.Reader) { _, _ = io.Copy(io.Discard, io.LimitReader(body, maxAnswerBytes)) }
