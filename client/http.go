package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"time"

	"go.opentelemetry.io/otel/propagation"
)

// apiCall is one call of the API, with the rule for its retries.
type apiCall struct {
	action string // text for error messages, for example "get group g"
	method string // GET when empty
	path   string // escaped
	query  url.Values
	header http.Header
	body   []byte
	stream bool // the answer is read while it arrives, without a timeout for the whole answer
	retry  retryPolicy
}

// retryPolicy reports whether a call that failed with err may be attempted again.
type retryPolicy func(err error) bool

// retryAlways is the policy of calls that have the same effect when they are made twice.
func retryAlways(err error) bool {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return true // the connection failed or broke
	}
	switch e.Status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// retryIfRefused is the policy of calls that may only be attempted again when the first attempt
// certainly had no effect.
func retryIfRefused(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Status == http.StatusTooManyRequests
}

// doJSON makes a call and decodes its JSON answer.
func doJSON[T any](ctx context.Context, a *API, c apiCall) (T, error) {
	var v T
	resp, err := a.do(ctx, c)
	if err != nil {
		return v, err
	}
	defer resp.Body.Close()
	defer drain(resp.Body)
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		return v, fmt.Errorf("%s: read answer: %w", c.action, err)
	}
	return v, nil
}

// do makes a call and retries it by its policy; it makes at most API.attempts attempts. It returns
// the last error without waiting when the wait would exceed API.maxWait or ctx's deadline, or when
// neverReached. A status other than 2xx is an *Error. The caller must close the answer's body.
func (a *API) do(ctx context.Context, c apiCall) (*http.Response, error) {
	for attempt := 1; ; attempt++ {
		resp, err := a.sendOnce(ctx, c)
		if err == nil {
			return resp, nil
		}
		err = fmt.Errorf("%s: %w", c.action, err)
		if ctx.Err() != nil || attempt >= a.attempts || !c.retry(err) || a.neverReached(err) {
			return nil, err
		}
		wait := backoff(err, attempt)
		if wait > a.maxWait || deadlineWithin(ctx, wait) {
			return nil, err
		}
		if stopped := a.sleep(ctx, wait); stopped != nil {
			return nil, fmt.Errorf("%w; then %w", err, stopped)
		}
	}
}

// neverReached reports whether err means that no connection could be made to a server that has
// never answered. do waits for a server that restarts, but not for a server whose address is
// probably wrong.
func (a *API) neverReached(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" && !a.answered.Load()
}

func (a *API) sendOnce(ctx context.Context, c apiCall) (*http.Response, error) {
	method := c.method
	if method == "" {
		method = http.MethodGet
	}
	target := a.base + c.path
	if len(c.query) > 0 {
		target += "?" + c.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(c.body))
	if err != nil {
		return nil, err
	}
	if len(c.body) > 0 {
		req.Header.Set("Content-Type", "application/json") // c.header may replace it
	}
	for k, v := range c.header {
		req.Header[k] = v
	}
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(req.Header))

	client := a.unary
	if c.stream {
		client = a.stream
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	a.answered.Store(true)
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	defer drain(resp.Body)
	return nil, problemOf(resp)
}

// drain reads the rest of a body, up to 64 KiB, so that the connection can be used again.
func drain(body io.Reader) { _, _ = io.CopyN(io.Discard, body, 64<<10) }

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// backoff returns how long to wait after an attempt that failed: as long as the server asks for. If
// the server asks for nothing, the wait doubles with each attempt, with jitter so that clients
// don't retry at the same time.
func backoff(err error, attempt int) time.Duration {
	if e, ok := errors.AsType[*Error](err); ok && e.RetryAfter > 0 {
		return e.RetryAfter
	}
	d := min(minBackoff<<min(attempt-1, 10), maxBackoff)
	return d/2 + rand.N(d/2)
}

// deadlineWithin reports whether ctx's deadline comes within d, so that waiting for d would be
// useless.
func deadlineWithin(ctx context.Context, d time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Until(deadline) < d
}

var validID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// groupPath returns the path of a group. It refuses an invalid id, which could change the URL.
func groupPath(group, rest string) (string, error) {
	if !validID.MatchString(group) || group == "." || group == ".." {
		return "", fmt.Errorf("group id %q: must match %s", group, validID)
	}
	return "/v1/groups/" + group + rest, nil
}
