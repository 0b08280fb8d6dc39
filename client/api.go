// Package client is a Go producer's side of bulkaction: API talks to the HTTP API, Producer writes
// the ingest stream. It hides encoding, safe repetition, splitting, paging and resuming.
package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// API is a client of the HTTP API. It is safe for concurrent use.
//
// An answer that is not a success is an *Error. Calls that can be repeated without harm are, a few
// times, after 429 and 503 (waiting as Retry-After says), 502, 504 and broken connections.
// Submissions and appends can, since each has an idempotency key.
type API struct {
	base           string
	unary          *http.Client
	stream         *http.Client
	attempts       int
	maxWait        time.Duration
	silenceTimeout time.Duration // after which a stream of events counts as broken
	outageTimeout  time.Duration // for how long a broken stream of events is resumed
	sleep          func(context.Context, time.Duration) error
	answered       atomic.Bool // something has answered at base
}

// Option changes an API from its defaults.
type Option func(*API)

// WithHTTPClient uses c, say for authentication. A Timeout that it has is not applied to streams.
func WithHTTPClient(c *http.Client) Option {
	return func(a *API) {
		unary, stream := *c, *c
		if unary.Timeout == 0 {
			unary.Timeout = callTimeout
		}
		stream.Timeout = 0
		a.unary, a.stream = &unary, &stream
	}
}

// WithRetry makes at most attempts (at least 1; default 4) of one call and never waits longer than
// maxWait (default 30s) between two: asked to wait longer, a call returns its *Error at once.
func WithRetry(attempts int, maxWait time.Duration) Option {
	return func(a *API) { a.attempts, a.maxWait = max(1, attempts), maxWait }
}

const callTimeout = time.Minute // of one attempt that is not a stream

// NewAPI returns a client of the API at baseURL, such as http://127.0.0.1:8080. It does
// not connect yet.
func NewAPI(baseURL string, opts ...Option) *API {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.ResponseHeaderTimeout = callTimeout

	a := &API{
		base:     strings.TrimRight(baseURL, "/"),
		attempts: 4, maxWait: 30 * time.Second,
		silenceTimeout: time.Minute, outageTimeout: time.Minute,
		sleep: redisx.Sleep,
	}
	WithHTTPClient(&http.Client{Transport: t})(a)
	for _, o := range opts {
		o(a)
	}
	return a
}

// CallOption changes one submission or append.
type CallOption func(*callOptions)

type callOptions struct{ key string }

// WithIdempotencyKey lets a submission or an append be made again, also by another process: the
// first answer is repeated, and no job is added twice. Key is up to 255 bytes of visible ASCII.
// Without it each call has a key of its own.
func WithIdempotencyKey(key string) CallOption {
	return func(o *callOptions) { o.key = key }
}

const headerIdempotency = "Idempotency-Key"

func keyOf(opts []CallOption) string {
	o := callOptions{key: uuid.NewString()}
	for _, opt := range opts {
		opt(&o)
	}
	return o.key
}

// Submit creates a group with its jobs, if any. The whole must fit in 32 MiB: send more by Append.
func (a *API) Submit(ctx context.Context, g Group, opts ...CallOption) (api.Accepted, error) {
	body, err := marshal(g)
	if err != nil {
		return api.Accepted{}, err
	}
	return a.SubmitJSON(ctx, body, opts...)
}

// SubmitJSON is Submit of a complete request body.
func (a *API) SubmitJSON(ctx context.Context, body []byte, opts ...CallOption) (api.Accepted, error) {
	header := http.Header{}
	header.Set(headerIdempotency, keyOf(opts))
	return doJSON[api.Accepted](ctx, a, apiCall{
		action: "submit group", method: http.MethodPost, path: "/v1/groups", header: header, body: body, retry: retryAlways,
	})
}

// Seal says that no more jobs come to the group; with total, none after that many.
func (a *API) Seal(ctx context.Context, group string, total *int64) (api.Accepted, error) {
	var body []byte
	if total != nil {
		body = []byte(`{"total":` + strconv.FormatInt(*total, 10) + `}`)
	}
	return a.command(ctx, group, "seal", body, retryAlways)
}

// Cancel ends the group at once: nothing of it starts any more.
func (a *API) Cancel(ctx context.Context, group string) (api.Accepted, error) {
	return a.command(ctx, group, "cancel", nil, retryAlways)
}

// Retry opens the next round of an ended group, with its failed jobs only. It is not repeated when
// it is unknown whether it had its effect, for that could open two rounds.
func (a *API) Retry(ctx context.Context, group string) (api.Accepted, error) {
	return a.command(ctx, group, "retry", nil, retryIfRefused)
}

func (a *API) command(ctx context.Context, group, verb string, body []byte, retry retryPolicy) (api.Accepted, error) {
	path, err := groupPath(group, "/"+verb)
	if err != nil {
		return api.Accepted{}, err
	}
	return doJSON[api.Accepted](ctx, a, apiCall{
		action: verb + " group " + group,
		method: http.MethodPost,
		path:   path,
		body:   body,
		retry:  retry,
	})
}

// Group returns the group as it is now.
func (a *API) Group(ctx context.Context, group string) (api.Group, error) {
	path, err := groupPath(group, "")
	if err != nil {
		return api.Group{}, err
	}
	return doJSON[api.Group](ctx, a, apiCall{action: "get group " + group, path: path, retry: retryAlways})
}

// Job returns the group's job with that ordinal: its state, and why it is waiting.
func (a *API) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	n := strconv.FormatInt(ordinal, 10)
	path, err := groupPath(group, "/jobs/"+n)
	if err != nil {
		return api.Job{}, err
	}
	return doJSON[api.Job](ctx, a, apiCall{action: "get job " + group + "." + n, path: path, retry: retryAlways})
}

// Stats returns queue sizes, rates, workers and stages.
func (a *API) Stats(ctx context.Context) (api.Stats, error) {
	return doJSON[api.Stats](ctx, a, apiCall{action: "get stats", path: "/v1/stats", retry: retryAlways})
}

// GroupFilter selects groups; an empty field selects all.
type GroupFilter struct {
	Tenant string
	Status api.Status
}

// Groups ranges over groups, newest first, fetching page after page. An error ends it.
func (a *API) Groups(ctx context.Context, f GroupFilter) iter.Seq2[api.Group, error] {
	query := url.Values{}
	if f.Tenant != "" {
		query.Set("tenant", f.Tenant)
	}
	if f.Status != "" {
		query.Set("status", string(f.Status))
	}
	c := apiCall{action: "list groups", path: "/v1/groups", query: query, retry: retryAlways}
	return pages(ctx, a, c, func(l api.GroupList) ([]api.Group, string) { return l.Groups, l.Cursor })
}

// DeadLetters ranges over dead letters, newest first, fetching page after page. An error ends it.
func (a *API) DeadLetters(ctx context.Context) iter.Seq2[api.DeadLetter, error] {
	c := apiCall{action: "list dead letters", path: "/v1/dead-letters", query: url.Values{"limit": {"200"}}, retry: retryAlways}
	return pages(ctx, a, c, func(l api.DeadLetterList) ([]api.DeadLetter, string) { return l.DeadLetters, l.Cursor })
}

// Results ranges over the results of the group's done jobs as the server sends them. An error, also
// of a stream that broke off, ends it.
func (a *API) Results(ctx context.Context, group string) iter.Seq2[api.Result, error] {
	return streamLines[api.Result](ctx, a, group, "results")
}

// Failures ranges over the group's failed jobs as the server sends them. An error, also of a stream
// that broke off, ends it.
func (a *API) Failures(ctx context.Context, group string) iter.Seq2[api.Failure, error] {
	return streamLines[api.Failure](ctx, a, group, "failures")
}
