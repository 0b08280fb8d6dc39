// Package push is the processor of the job type PUSH_NOTIFICATION: each job sends one push message
// by FCM, APNs or Web Push. The package hides the accounts with their credentials and connections,
// and how answers of the platforms become decisions about a job. Device tokens, endpoints and keys
// appear in no error, log line or result.
package push

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// Type is the job type that the processor serves.
const Type = "PUSH_NOTIFICATION"

// These are the platforms.
const (
	FCM     = "fcm"
	APNs    = "apns"
	WebPush = "webpush"
)

// These are the error codes of the processor. An answer to which none of them applies has the code
// PUSH_ and the status, for example PUSH_503; the job is retried. After a 429 the job is throttled,
// with the code [processor.CodeThrottled].
const (
	CodeBadPayload        = "PUSH_BAD_PAYLOAD"        // permanent: the payload is no message to one target
	CodeNotConfigured     = "PUSH_NOT_CONFIGURED"     // permanent: the target's platform has no account
	CodeUnregistered      = "PUSH_UNREGISTERED"       // permanent: the target does not exist any more
	CodeInvalidArgument   = "PUSH_INVALID_ARGUMENT"   // permanent: the platform does not take the target or message
	CodeSenderMismatch    = "PUSH_SENDER_MISMATCH"    // permanent: the target belongs to another app or project
	CodeTooLarge          = "PUSH_TOO_LARGE"          // permanent: the message is too large
	CodeAddressRefused    = "ADDRESS_REFUSED"         // permanent: the endpoint's address is not public
	CodeCredentialRefused = "PUSH_CREDENTIAL_REFUSED" // retry: the platform refuses the account
	CodeUnreachable       = "PUSH_UNREACHABLE"        // retry: no connection, or no answer came
)

const (
	handshakeTimeout    = 10 * time.Second
	idleTimeout         = 90 * time.Second
	maxIdleConnsPerHost = 64
	// pingAfter is how long a connection may be silent before an HTTP/2 ping tests it.
	pingAfter = 30 * time.Second
)

// Result is the result of a job that is done.
type Result struct {
	Platform string `json:"platform"` // fcm, apns or webpush
	Code     int    `json:"code"`     // the HTTP status with which the platform accepted the message
}

// Option changes a [Processor].
type Option func(*Processor)

// WithChoice sets how the account for each message is chosen. The pools of accounts are named
// push.fcm, push.apns and push.webpush. Without this option, each process uses the accounts in
// turn.
func WithChoice(c credential.Choice) Option { return func(p *Processor) { p.choose = c } }

// Processor runs PUSH_NOTIFICATION jobs. The payload is one of these:
//
//	{"deviceToken": …, "title": …, "message": …}
//	{"to": {TARGET}, "title"?, "body"?, "data"?, "ttl_seconds"?, "collapse_key"?, "priority"?}
//
// TARGET is one of
//
//	"fcm": a device token
//	"fcm_topic": the name of a topic
//	"apns": a device token
//	"webpush": {"endpoint": …, "p256dh": …, "auth": …}
//
// The first form is for FCM. data is an object, priority is high or normal.
type Processor struct {
	config   Config
	choose   credential.Choice
	parts    parts
	accounts atomic.Pointer[accounts]
	file     *accountsfile.File
}

// New returns a processor with the accounts in config.AccountsFile. It connects when the first job
// runs. The error names every invalid field, or every mistake in the accounts file.
func New(config Config, options ...Option) (*Processor, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure push: %w", err)
	}
	roots, err := config.rootCAs()
	if err != nil {
		return nil, fmt.Errorf("configure push: TLS_CA_FILE: %w", err)
	}
	p := &Processor{
		config: config, choose: credential.TakeTurns,
		parts: parts{
			now: time.Now, roots: roots, services: newServicesTransport(roots),
			public: egress.NewClient(egress.Options{
				Policy: config.policy(), MaxIdleConnsPerHost: maxIdleConnsPerHost, RootCAs: roots,
			}),
		},
	}
	for _, option := range options {
		option(p)
	}
	p.accounts.Store(&accounts{})
	p.file = accountsfile.NewFile(config.AccountsFile, "push accounts", p.load)
	if _, err := p.Reload(); err != nil {
		return nil, err
	}
	return p, nil
}

// newServicesTransport returns the HTTP transport for FCM and the token endpoints, whose addresses
// the accounts file names.
func newServicesTransport(roots *x509.CertPool) *http.Transport {
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2:   true,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter},
		TLSHandshakeTimeout: handshakeTimeout,
		IdleConnTimeout:     idleTimeout,
		MaxIdleConnsPerHost: maxIdleConnsPerHost,
		DisableCompression:  true, // answers are short
	}
}

// newPost returns a POST request to a URL of an account. It costs less than [http.NewRequest],
// because the account's URL is parsed only once. The transport that sends it follows no redirect.
func newPost(ctx context.Context, target *url.URL, header http.Header, body []byte) *http.Request {
	getBody := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	content, _ := getBody()
	r := &http.Request{
		Method: http.MethodPost, URL: target, Host: target.Host, Header: header,
		Body: content, GetBody: getBody, ContentLength: int64(len(body)),
	}
	return r.WithContext(ctx)
}

// noRedirect makes an HTTP client return a redirect as the answer. It is not followed, because a
// credential goes only to the host that it is for.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Type is PUSH_NOTIFICATION.
func (p *Processor) Type() string { return Type }

// Close closes the idle connections. Calls that run go on.
func (p *Processor) Close() error {
	p.parts.services.CloseIdleConnections()
	p.parts.public.CloseIdleConnections()
	for _, pool := range *p.accounts.Load() {
		for _, m := range pool.members {
			m.sender.close()
		}
	}
	return nil
}

// Admit borrows an account for the job's message and returns it as the pass. If the payload is
// wrong, or the platform has no account, it returns no pass: Process then fails the job.
func (p *Processor) Admit(ctx context.Context, job processor.Job) (processor.Pass, error) {
	m, err := parsePayload(job.Payload)
	if err != nil {
		return nil, nil
	}
	pool := p.pool(m.platform)
	if pool == nil {
		return nil, nil
	}
	pass, err := credential.Admit(ctx, pool.source, func(id string) bool {
		return p.file.Knows(func() bool {
			_, known := p.member(m.platform, id)
			return known
		})
	})
	if err != nil {
		return nil, err
	}
	return admitted{pass, m}, nil
}

// admitted is the pass of a job: its account, and the message that Admit has read from the payload.
type admitted struct {
	processor.Pass
	message *message
}

type messageKey struct{}

func (a admitted) Into(ctx context.Context) context.Context {
	return context.WithValue(a.Pass.Into(ctx), messageKey{}, a.message)
}

// messageOf returns the message of an admitted job, or reads it from the job's payload.
func messageOf(ctx context.Context, job processor.Job) (*message, error) {
	if m, ok := ctx.Value(messageKey{}).(*message); ok {
		return m, nil
	}
	return parsePayload(job.Payload)
}

// Availability is that of all platforms together.
func (p *Processor) Availability() processor.Availability {
	var sources []credential.Source
	for _, pool := range *p.accounts.Load() {
		sources = append(sources, pool.source)
	}
	return credential.AvailabilityOf(sources...)
}

// pool returns the accounts of a platform; nil if it has none.
func (p *Processor) pool(platform string) *pool { return (*p.accounts.Load())[platform] }

func (p *Processor) member(platform, id string) (m member, known bool) {
	if pool := p.pool(platform); pool != nil {
		m, known = pool.members[id]
	}
	return m, known
}

// Process sends the job's message with the account that Admit got, and returns a [Result]. An
// answer about the recipient or the message is a permanent error. The job is throttled after a 429,
// deferred if the account has been removed or turned out to fail, and retried after any other
// answer and after a failed connection.
func (p *Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	m, err := messageOf(ctx, job)
	if err != nil {
		return nil, processor.Permanent(CodeBadPayload, fmt.Errorf("read push payload: %w", err))
	}
	if p.pool(m.platform) == nil {
		return nil, processor.Permanent(CodeNotConfigured, fmt.Errorf("push by %s: no account", m.platform))
	}
	loan, err := credential.From(ctx)
	if err != nil {
		return nil, err
	}
	if loan == nil {
		return nil, processor.Deferred(0, "push by "+m.platform+": accounts were added")
	}
	account, known := p.member(m.platform, loan.ID())
	if !known {
		return nil, processor.Deferred(0, "push by "+m.platform+": the account was removed")
	}
	ctx, cancel := context.WithTimeout(ctx, p.config.Timeout)
	defer cancel()
	a := account.sender.send(ctx, job, m)
	if a.err != nil {
		return nil, credential.Verdict(a.err, a.outcome)
	}
	return Result{Platform: m.platform, Code: a.status}, nil
}
