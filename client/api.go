// Package client submits and follows bulk actions from Go by the HTTP API. It hides encoding,
// retries, the splitting of large appends, paging, and the resuming of broken event streams. It
// imports only the standard library and small packages of this module. Package client/producer
// submits through Redis, and package client/stream follows events there.
package client

import (
	"context"
	"crypto/tls"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client/internal/submission"
)

// API is a client of the HTTP API. It is safe for concurrent use.
//
// An answer that is not a success is an error that wraps an *Error. A call is retried a few times
// after status 429, and one that may be repeated without harm also after 502, 503, 504 and a broken
// connection. The client waits as long as Retry-After says, unless that is too long (see
// [WithRetry]). While no server has ever answered at the address, a call that can't connect fails
// at once. Submissions and appends may be repeated because each carries an idempotency key.
type API struct {
	*transport
	jobsAPI
	operatorAPI
	guardAPI
	roomAPI
}

// Option changes a setting of an API from its default.
type Option func(*API)

// WithHTTPClient makes the API use c, for example for the authentication of a proxy or for traces:
// the API sends no traceparent of its own, and the requests have the caller's context, from which
// an instrumented Transport, such as that of OpenTelemetry's otelhttp, takes the trace. The Timeout
// of c (0: a minute) limits one attempt of a call; it is not applied to streams.
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

// WithTLSConfig sets the TLS configuration for an https:// address: RootCAs for an authority of
// your own, Certificates for a server that demands one (default: the authorities of the system). If
// WithHTTPClient is given as well, the last one of the two counts.
func WithTLSConfig(c *tls.Config) Option {
	return func(a *API) {
		t := newTransport()
		t.TLSClientConfig = c
		WithHTTPClient(&http.Client{Transport: t})(a)
	}
}

// newTransport returns the HTTP transport that an API uses without the option WithHTTPClient.
func newTransport() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.ResponseHeaderTimeout = callTimeout
	return t
}

// WithRetry sets how often one call is attempted (at least once; default 4) and the longest wait
// between two attempts (default 30s). If the next wait would be longer, for example because the
// server asks for it, the call returns the error of the last attempt at once.
func WithRetry(attempts int, maxWait time.Duration) Option {
	return func(a *API) { a.attempts, a.maxWait = max(1, attempts), maxWait }
}

// WithRetryNotice makes the API call notice before it waits to attempt a call again: with the error
// of the attempt, the wait, and how many attempts are left. Calls that run at the same time call
// notice at the same time. The waits of Events after a broken stream are not noticed.
func WithRetryNotice(notice func(err error, wait time.Duration, left int)) Option {
	return func(a *API) { a.notice = notice }
}

const callTimeout = time.Minute // timeout of one attempt of a call; of a stream, until its answer begins

// NewAPI returns a client of the API at baseURL, such as http://127.0.0.1:8080. It opens no
// connection yet.
func NewAPI(baseURL string, opts ...Option) *API {
	shared := &transport{
		base:           strings.TrimRight(baseURL, "/"),
		attempts:       4,
		maxWait:        30 * time.Second,
		silenceTimeout: time.Minute,
		outageTimeout:  time.Minute,
		sleep:          sleep,
	}
	a := &API{
		transport: shared, jobsAPI: jobsAPI{shared}, operatorAPI: operatorAPI{shared}, guardAPI: guardAPI{shared},
		roomAPI: roomAPI{shared},
	}
	WithHTTPClient(&http.Client{Transport: newTransport()})(a)
	for _, o := range opts {
		o(a)
	}
	if shared.key != "" {
		shared.sendKey()
	}
	return a
}

// CallOption changes a setting of one submission or append.
type CallOption func(*callOptions)

type callOptions struct {
	key   string
	table url.Values // the query parameters of an append of CSV
}

// WithIdempotencyKey makes a submission or an append safe to repeat, also from another process: the
// server repeats its first answer and adds no job twice, for a day by default. The content must be
// the same. A submission with other content fails with status 409; an append adds the jobs of each
// request whose content differs. key is 1 to 255 bytes of visible ASCII. Without this option each
// call has a random key.
func WithIdempotencyKey(key string) CallOption {
	return func(o *callOptions) { o.key = key }
}

// WithDelimiter sets the character between two fields for AppendCSV: a comma (the default), a
// semicolon, | or a tab. Other appends ignore it.
func WithDelimiter(d byte) CallOption {
	return func(o *callOptions) { o.setTable("delimiter", string(rune(d))) }
}

// WithKeyColumn names the column of the CSV whose values become the keys of the jobs that AppendCSV
// adds. The column stays in the payload. A row without a value has no key.
func WithKeyColumn(name string) CallOption {
	return func(o *callOptions) { o.setTable("key_column", name) }
}

// WithColumnTypes sets the types of columns for AppendCSV: name:type, with commas between. The
// types are string (the default), number and boolean. A number is written as in JSON, a boolean is
// true or false in any case; an empty field becomes null. Other appends ignore it.
func WithColumnTypes(types string) CallOption {
	return func(o *callOptions) { o.setTable("types", types) }
}

func (o *callOptions) setTable(name, value string) {
	if o.table == nil {
		o.table = url.Values{}
	}
	o.table.Set(name, value)
}

const headerIdempotency = "Idempotency-Key"

func optionsOf(opts []CallOption) callOptions {
	o := callOptions{key: submission.NewKey()}
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// Submit creates a group with its jobs, if any. The request may have up to 32 MiB; add more jobs
// with Append.
func (a *API) Submit(ctx context.Context, g Submission, opts ...CallOption) (api.Accepted, error) {
	body, err := submission.Encode(g)
	if err != nil {
		return api.Accepted{}, err
	}
	return a.SubmitJSON(ctx, body, opts...)
}

// SubmitJSON creates a group from a complete request body of POST /v1/groups.
func (a *API) SubmitJSON(ctx context.Context, body []byte, opts ...CallOption) (api.Accepted, error) {
	header := http.Header{}
	header.Set(headerIdempotency, optionsOf(opts).key)
	return doJSON[api.Accepted](ctx, a.transport, apiCall{
		action: "submit group",
		method: http.MethodPost,
		path:   "/v1/groups",
		header: header,
		body:   body,
	})
}

// Seal tells the server that no more jobs come to the group. With total, the group takes jobs until
// it has total jobs.
func (a *API) Seal(ctx context.Context, group string, total *int64) (api.Accepted, error) {
	c := command("seal", group)
	if total != nil {
		c.body = []byte(`{"total":` + strconv.FormatInt(*total, 10) + `}`)
	}
	return doJSON[api.Accepted](ctx, a.transport, c)
}

// Cancel ends the group at once: none of its jobs starts any more, and all unfinished ones, also
// those in flight, become cancelled.
func (a *API) Cancel(ctx context.Context, group string) (api.Accepted, error) {
	return doJSON[api.Accepted](ctx, a.transport, command("cancel", group))
}

// Retry opens the next round of an ended group, with its failed jobs only. The client repeats the
// call only after status 429. When it is unknown whether an attempt had its effect, Retry returns
// the error: a second attempt could open two rounds.
func (a *API) Retry(ctx context.Context, group string) (api.Accepted, error) {
	return a.RetryChosen(ctx, group, api.RetryChoice{})
}

// Pause stops the group: none of its jobs starts any more, and its running jobs finish.
func (a *API) Pause(ctx context.Context, group string) (api.Accepted, error) {
	return doJSON[api.Accepted](ctx, a.transport, command("pause", group))
}

// Resume undoes Pause.
func (a *API) Resume(ctx context.Context, group string) (api.Accepted, error) {
	return doJSON[api.Accepted](ctx, a.transport, command("resume", group))
}

func command(verb, group string) apiCall {
	return callOn(verb, http.MethodPost, "group", group, "/"+verb)
}

// Group returns the group's current state.
func (a *API) Group(ctx context.Context, group string) (api.Group, error) {
	return doJSON[api.Group](ctx, a.transport, callOn("get", http.MethodGet, "group", group, ""))
}

// Why says what the group's next job waits for. Job says it for any job of the group.
func (a *API) Why(ctx context.Context, group string) (api.Why, error) {
	return doJSON[api.Why](ctx, a.transport, callOn("explain", http.MethodGet, "group", group, "/why"))
}

// Results iterates over the results of the group's reduced jobs, in the order in which they were
// reduced. Jobs that are done but not reduced yet are left out. An error ends the iteration; a
// stream that breaks off is an error too.
func (a *API) Results(ctx context.Context, group string) iter.Seq2[api.Result, error] {
	return streamLines[api.Result](ctx, a.transport, group, "results")
}

// Failures iterates over the group's failed jobs, each once and in no order. An error ends the
// iteration; a stream that breaks off is an error too.
func (a *API) Failures(ctx context.Context, group string) iter.Seq2[api.Failure, error] {
	return streamLines[api.Failure](ctx, a.transport, group, "failures")
}
