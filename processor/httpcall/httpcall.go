// Package httpcall is the processor of the job type HTTP: it makes one HTTP call a job. It hides
// the connections, what a partner's answer means for a job, and the guard that keeps jobs, which
// are other people's input, from calling the inside of the network that the worker runs in.
package httpcall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/bulkaction/bulkaction/processor"
)

// Type is the job type that the processor serves.
const Type = "HTTP"

// Codes of answers that no status stands for; a status has the code HTTP_ and its number,
// such as HTTP_404.
const (
	CodeUnreachable    = "HTTP_UNREACHABLE" // a retry: no connection, or one that failed before the answer was whole
	CodeAddressRefused = "ADDRESS_REFUSED"  // permanent: the host is at an address that jobs may not call
)

const (
	// maxRetryAfter bounds what a partner can ask for, and keeps a huge number from overflowing.
	maxRetryAfter = 24 * time.Hour
	// maxDrainBytes is how much of an answer nobody wants is read, so that its connection can
	// be used again.
	maxDrainBytes      = 64 << 10
	maxHeaderBytes     = 64 << 10
	idleTimeout        = 90 * time.Second
	handshakeTimeout   = 10 * time.Second
	maxIdleConnections = 1024
)

// Processor serves HTTP. Its payload is
//
//	{"url": …, "method"?: "POST", "headers"?: {…}, "body"?: any JSON}
//
// where a body that is a string is sent as it is, and any other as JSON.
type Processor struct {
	config Config
	client *http.Client
}

// New makes a processor; it does not connect before the first job. The error names every bad field.
func New(config Config) (*Processor, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure HTTP processor: %w", err)
	}
	dialer := &net.Dialer{Control: config.checkAddress}
	return &Processor{config: config, client: &http.Client{
		Transport: &http.Transport{
			Proxy:                  nil, // a proxy would dial for us, and past checkAddress
			DialContext:            dialer.DialContext,
			ForceAttemptHTTP2:      true,
			TLSHandshakeTimeout:    handshakeTimeout,
			IdleConnTimeout:        idleTimeout,
			MaxIdleConns:           maxIdleConnections,
			MaxIdleConnsPerHost:    config.MaxIdleConnsPerHost,
			MaxResponseHeaderBytes: maxHeaderBytes,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// Type is HTTP.
func (p *Processor) Type() string { return Type }

// Close ends the idle connections.
func (p *Processor) Close() error {
	p.client.CloseIdleConnections()
	return nil
}

// Process makes the call, with the job's id as Idempotency-Key, unless the payload has a key of its
// own, and the trace of ctx as traceparent. A 2xx is done, with {"status": 200, "body": …} as its
// result. 429, and 503 with Retry-After, are throttled; any other 5xx is a retry, and any other
// status, redirects included, permanent. A connection that fails is a retry.
func (p *Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	request, err := newRequest(job)
	if err != nil {
		return nil, processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("read HTTP payload: %w", err))
	}
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(request.Header))
	ctx, cancel := context.WithTimeout(ctx, p.config.Timeout)
	defer cancel()

	response, err := p.client.Do(request.WithContext(ctx))
	if err != nil {
		return nil, failure(ctx, request, err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode/100 != 2 {
		_, _ = io.CopyN(io.Discard, response.Body, maxDrainBytes)
		return nil, refusal(request, response)
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, int64(p.config.MaxResponseBytes)+1))
	if err != nil {
		return nil, failure(ctx, request, err)
	}
	truncated := len(body) > p.config.MaxResponseBytes
	if truncated {
		body = body[:p.config.MaxResponseBytes]
		_, _ = io.CopyN(io.Discard, response.Body, maxDrainBytes)
	}
	return newResult(response.StatusCode, body, truncated), nil
}

// failure is the answer to a call without a whole response. Only the host is named: the rest of a
// URL may hold a secret.
func failure(ctx context.Context, request *http.Request, err error) error {
	var withURL *url.Error
	if errors.As(err, &withURL) {
		err = withURL.Err
	}
	host := request.URL.Hostname()
	switch {
	case errors.Is(err, errAddressRefused):
		return processor.Permanent(CodeAddressRefused, fmt.Errorf("call %s: %w", host, errAddressRefused))
	case ctx.Err() != nil:
		return fmt.Errorf("call %s: %w", host, ctx.Err())
	}
	return processor.Retry(CodeUnreachable, fmt.Errorf("call %s: %w", host, err))
}

// refusal is the answer to a status that is not 2xx.
func refusal(request *http.Request, response *http.Response) error {
	status := response.StatusCode
	code := "HTTP_" + strconv.Itoa(status)
	err := fmt.Errorf("call %s: status %d %s", request.URL.Hostname(), status, http.StatusText(status))
	after, given := retryAfter(response.Header.Get("Retry-After"), time.Now())
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable && given:
		return processor.Throttled(after, err)
	case status/100 == 5:
		return processor.Retry(code, err)
	}
	return processor.Permanent(code, err)
}

// retryAfter reads a Retry-After header: seconds, or a date (RFC 9110, 10.2.3).
func retryAfter(header string, now time.Time) (after time.Duration, given bool) {
	if seconds, err := strconv.ParseUint(header, 10, 64); err == nil {
		return time.Duration(min(seconds, uint64(maxRetryAfter/time.Second))) * time.Second, true
	}
	if date, err := http.ParseTime(header); err == nil {
		return min(max(date.Sub(now), 0), maxRetryAfter), true
	}
	return 0, false
}
