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
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
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

// Config says where the accounts are and what calls may do. Each field is set by an environment
// variable with the prefix PUSH_.
type Config struct {
	// AccountsFile is a YAML file that lists the accounts of FCM, APNs and Web Push. It is read
	// again when it changes. Empty means that the process does not serve PUSH_NOTIFICATION.
	AccountsFile string `env:"ACCOUNTS_FILE"`
	credential.Limits
	// Timeout is the longest time for one push with its answer. The job's own timeout applies as
	// well.
	Timeout time.Duration `env:"TIMEOUT" envDefault:"30s"`
	// TLSCAFile is a PEM file. If it is set, only the certificate authorities in it are trusted; if
	// it is empty, those of the operating system are.
	TLSCAFile string `env:"TLS_CA_FILE"`
	// AllowPrivate lets endpoints of Web Push have every address, also private and loopback
	// addresses. Each producer can then reach every HTTPS service that this process can reach.
	AllowPrivate bool `env:"ALLOW_PRIVATE" envDefault:"false"`
	// AllowedCIDRs are networks in which endpoints of Web Push may be although they are not public,
	// for example 10.1.0.0/16.
	AllowedCIDRs []netip.Prefix `env:"ALLOWED_CIDRS"`
}

// Validate checks every field, but not the content of AccountsFile, because only workers can read
// it. The error joins one error for each invalid field and names the field as its environment
// variable, without the prefix.
func (c Config) Validate() error {
	var errs []error
	if c.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("TIMEOUT: %s is not above 0", c.Timeout))
	}
	for _, err := range c.policy().Validate() {
		errs = append(errs, fmt.Errorf("ALLOWED_CIDRS: %w", err))
	}
	if _, err := c.rootCAs(); err != nil {
		errs = append(errs, fmt.Errorf("TLS_CA_FILE: %w", err))
	}
	return errors.Join(errs...)
}

func (c Config) policy() egress.Policy {
	return egress.Policy{AllowPrivate: c.AllowPrivate, AllowedCIDRs: c.AllowedCIDRs}
}

// rootCAs returns the certificate authorities in TLSCAFile; nil without a file, so that those of
// the operating system are trusted.
func (c Config) rootCAs() (*x509.CertPool, error) {
	if c.TLSCAFile == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(c.TLSCAFile)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no PEM certificate", c.TLSCAFile)
	}
	return pool, nil
}

// Reload reads the accounts file and the secrets again, and uses the accounts if they have no
// mistake. If the files have not changed since the last call, it does nothing, so a mistake is
// returned once; but after an error of the Choice it tries again.
func (p *Processor) Reload() (changed bool, err error) { return p.file.Reload() }

// load reads the accounts file. It returns the function that lets jobs use its accounts.
func (p *Processor) load(r *accountsfile.Reader) (use func() error) {
	before := *p.accounts.Load()
	l := &loader{Reader: r, parts: p.parts, before: before}
	l.load()
	return func() error {
		after := accounts{}
		for platform, members := range l.members {
			var err error
			if after[platform], err = p.newPool(platform, members); err != nil {
				return err
			}
		}
		p.accounts.Store(&after)
		before.closeAllBut(after)
		return nil
	}
}

func (p *Processor) newPool(platform string, members []member) (*pool, error) {
	all := &pool{members: map[string]member{}}
	choices := make([]credential.Account, len(members))
	for i, m := range members {
		all.members[m.account.ID] = m
		choices[i] = m.account
	}
	var err error
	if all.source, err = p.choose("push."+platform, choices); err != nil {
		return nil, fmt.Errorf("choose among the push accounts of %s: %w", platform, err)
	}
	return all, nil
}

// closeAllBut closes the idle connections of those accounts in a whose sender is not used in after.
// A job may still use such an account; a connection that it opens then ends by its idle timeout.
func (a accounts) closeAllBut(after accounts) {
	used := map[sender]bool{}
	for _, pool := range after {
		for _, m := range pool.members {
			used[m.sender] = true
		}
	}
	for _, pool := range a {
		for _, m := range pool.members {
			if !used[m.sender] {
				m.sender.close()
			}
		}
	}
}

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
