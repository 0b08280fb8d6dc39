// Package client submits and follows bulk actions from Go by the HTTP API. It hides encoding,
// retries, the splitting of large appends, paging, and the resuming of broken event streams. It
// imports only the standard library and small packages of this module. Package client/producer
// submits through Redis, and package client/stream follows events there.
package client

import (
	"context"
	"crypto/tls"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

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
	base           string
	key            string // API key, "" for none
	unary          *http.Client
	stream         *http.Client
	attempts       int
	maxWait        time.Duration
	silenceTimeout time.Duration // a stream of events that is silent for so long counts as broken
	outageTimeout  time.Duration // for how long a broken stream of events is resumed
	// notice is called before each wait; nil: nothing is.
	notice   func(err error, wait time.Duration, left int)
	sleep    func(context.Context, time.Duration) error
	answered atomic.Bool // some server has answered at base
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
	a := &API{
		base:           strings.TrimRight(baseURL, "/"),
		attempts:       4,
		maxWait:        30 * time.Second,
		silenceTimeout: time.Minute,
		outageTimeout:  time.Minute,
		sleep:          sleep,
	}
	WithHTTPClient(&http.Client{Transport: newTransport()})(a)
	for _, o := range opts {
		o(a)
	}
	if a.key != "" {
		a.sendKey()
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

// WithAPIKey makes the API send key with each request, as Authorization: Bearer. The key is sent to
// the scheme, host and port of the base URL only: a request that is redirected elsewhere goes there
// without it. The key appears in no error.
func WithAPIKey(key string) Option {
	return func(a *API) { a.key = key }
}

// keySender is an http.RoundTripper that adds the API key. The http.Client that uses it never sees
// the key, so it can't send the key to the target of a redirect, as net/http does for another port
// of the same host and from https to http.
type keySender struct {
	next   http.RoundTripper // nil: http.DefaultTransport
	origin string
	key    string
}

func (k keySender) RoundTrip(r *http.Request) (*http.Response, error) {
	if originOf(r.URL) == k.origin {
		r = r.Clone(r.Context()) // a RoundTripper must not change its request
		r.Header.Set("Authorization", "Bearer "+k.key)
	}
	if k.next == nil {
		return http.DefaultTransport.RoundTrip(r)
	}
	return k.next.RoundTrip(r)
}

// originOf returns the scheme, host and port of a URL.
func originOf(u *url.URL) string {
	scheme, port := strings.ToLower(u.Scheme), u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[scheme]
	}
	return scheme + "://" + strings.ToLower(u.Hostname()) + ":" + port
}

// sendKey makes both clients send the key.
func (a *API) sendKey() {
	base, err := url.Parse(a.base)
	if err != nil {
		return // checkBase makes each call fail
	}
	for _, c := range []*http.Client{a.unary, a.stream} {
		c.Transport = keySender{next: c.Transport, origin: originOf(base), key: a.key}
	}
}
