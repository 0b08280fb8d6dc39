// Package httpcall is the processor of the job type HTTP: each job makes one HTTP call. The package
// hides its connections and what a response means for a job. Payloads are untrusted: the package
// prevents jobs from calling addresses inside of the worker's own network, unless the Config allows
// that.
package httpcall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"go.opentelemetry.io/otel/propagation"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor"
)

// Type is the job type that the processor serves.
const Type = "HTTP"

// These error codes are for calls without a response. A response that is not 2xx has the code HTTP_
// and its status, for example HTTP_404, or [processor.CodeThrottled] if it throttles the job.
const (
	CodeUnreachable    = "HTTP_UNREACHABLE" // retry: no connection, or it failed before the whole response came
	CodeAddressRefused = "ADDRESS_REFUSED"  // permanent: jobs may not call the host's address
)

// maxDrainBytes is how much of an unwanted response body is read and discarded, so that its
// connection can be used again.
const maxDrainBytes = 64 << 10

// Processor runs HTTP jobs. The payload is
//
//	{"url": …, "method"?: "POST", "headers"?: {…}, "body"?: any JSON}
//
// A body that is a string is sent unchanged, null sends none, and any other body is sent as JSON.
type Processor struct {
	config Config
	client *http.Client
}

// New returns a processor. It connects when the first job runs. The error names every invalid
// field.
func New(config Config) (*Processor, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure HTTP processor: %w", err)
	}
	return &Processor{config: config, client: egress.NewClient(egress.Options{
		Policy: config.policy(), MaxIdleConnsPerHost: config.MaxIdleConnsPerHost,
	})}, nil
}

// Type is HTTP.
func (p *Processor) Type() string { return Type }

// Close closes the idle connections. Calls that run go on.
func (p *Processor) Close() error {
	p.client.CloseIdleConnections()
	return nil
}

// Process makes the call. It sends the job's id as Idempotency-Key, unless the payload sets that
// header, the trace of ctx as traceparent, and which job it is in headers Bulkaction-…. The answer
// decides about the job:
//
//	header Bulkaction-Outcome    as it says: permanent, retry, defer or throttle
//	2xx                          done, with the result {"status": 200, "body": …}
//	429, or 503 with Retry-After throttled
//	any other 5xx                retry
//	any other status, redirects  permanent
//	the address is refused       permanent
//	no whole response            retry
func (p *Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	request, err := newRequest(job, nil)
	if err != nil {
		return nil, invalidPayload(err)
	}
	result, _, err := p.call(ctx, p.client, request, nil)
	return result, err
}

func invalidPayload(err error) error {
	return processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("read HTTP payload: %w", err))
}

// call makes one HTTP call. used is the credential that the request carries (nil: none): call hides
// its secret in the result and the error. status is that of the response; 0: no whole response
// came.
func (p *Processor) call(
	ctx context.Context, client *http.Client, request *http.Request, used *member,
) (result any, status int, err error) {
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(request.Header))
	ctx, cancel := context.WithTimeout(ctx, p.config.Timeout)
	defer cancel()

	response, err := client.Do(request.WithContext(ctx))
	if err != nil {
		return nil, 0, failure(ctx, request, err, used)
	}
	defer func() { _ = response.Body.Close() }()
	if said := saidOutcome(response); response.StatusCode/100 != 2 || said != "" {
		return nil, response.StatusCode, refusal(request, response, said, used)
	}
	// A secret may begin in the kept part of the body and end behind it. Read so far that it is
	// found.
	most := p.config.MaxResponseBytes
	body, err := io.ReadAll(io.LimitReader(response.Body, int64(most+used.longestForm())+1))
	if err != nil {
		return nil, 0, failure(ctx, request, err, used)
	}
	body = used.hide(body)
	truncated := len(body) > most
	if truncated {
		body = body[:most]
		_, _ = io.CopyN(io.Discard, response.Body, maxDrainBytes)
	}
	return newResult(response.StatusCode, body, truncated), response.StatusCode, nil
}

// failure returns the error of a call without a whole response. The error names only the host,
// because the rest of a URL may contain a secret. It hides the secret of used, because err may
// repeat a part of the response.
func failure(ctx context.Context, request *http.Request, err error, used *member) error {
	var withURL *url.Error
	if errors.As(err, &withURL) {
		err = withURL.Err
	}
	host := request.URL.Hostname()
	switch {
	case errors.Is(err, egress.ErrPublicAddress):
		return invalidPayload(errNotEncrypted)
	case errors.Is(err, egress.ErrAddressRefused):
		return processor.Permanent(CodeAddressRefused, fmt.Errorf(
			"call %s: %w; BULKACTION_HTTP_PROCESSOR_ALLOWED_CIDRS or "+
				"BULKACTION_HTTP_PROCESSOR_ALLOW_PRIVATE would allow it",
			host, egress.ErrAddressRefused,
		))
	case ctx.Err() != nil:
		return fmt.Errorf("call %s: %w", host, ctx.Err())
	case used != nil:
		err = errors.New(string(used.hide([]byte(err.Error()))))
	}
	return processor.Retry(CodeUnreachable, fmt.Errorf("call %s: %w", host, err))
}
