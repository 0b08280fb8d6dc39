// Package push is the processor of the job type PUSH_NOTIFICATION: each job sends one push message
// by FCM, APNs or Web Push. The package hides the accounts with their credentials and connections,
// and how answers of the platforms become decisions about a job. Device tokens, endpoints and keys
// appear in no error, log line or result.
package push

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/egress"
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

// These are the error codes of the processor. An answer with any other status has the code PUSH_
// and the status, for example PUSH_503; the job is retried.
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
	// pingAfter is the silence after which a connection is tested by a ping.
	pingAfter = 30 * time.Second
	// unknownAccountWait is how long a job waits if its account was removed from the accounts file
	// while the job got it.
	unknownAccountWait = time.Second
)

// Result is the result of a job that is done.
type Result struct {
	Platform string `json:"platform"` // fcm, apns or webpush
	Code     int    `json:"code"`     // the HTTP status with which the platform accepted the message
}

// Choice returns the source that decides which of a platform's accounts sends the next message. It
// is called for each platform that has accounts, at start and after each change of the accounts.
type Choice func(platform string, accounts []credential.Account) (credential.Source, error)

// Option changes a processor.
type Option func(*Processor)

// WithChoice sets what decides about accounts. Without it, a process uses them in turn.
func WithChoice(c Choice) Option { return func(p *Processor) { p.choose = c } }

func inTurn(_ string, accounts []credential.Account) (credential.Source, error) {
	ids := make([]string, len(accounts))
	for i, a := range accounts {
		ids[i] = a.ID
	}
	return credential.InTurn(ids...), nil
}

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
	choose   Choice
	parts    parts
	accounts atomic.Pointer[accounts]
	seen     [digestBytes]byte // the files as reload saw them last, good or bad; reload alone uses it
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
		config: config, choose: inTurn,
		parts: parts{
			now: time.Now, roots: roots, services: newServicesClient(roots),
			public: egress.NewClient(egress.Options{
				Policy: config.policy(), MaxIdleConnsPerHost: maxIdleConnsPerHost, RootCAs: roots,
			}),
		},
	}
	for _, option := range options {
		option(p)
	}
	if _, err := p.reload(); err != nil {
		return nil, err
	}
	return p, nil
}

// newServicesClient returns a client for addresses that the accounts file names.
func newServicesClient(roots *x509.CertPool) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			Proxy:               http.ProxyFromEnvironment,
			TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:   true,
			HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter},
			TLSHandshakeTimeout: handshakeTimeout,
			IdleConnTimeout:     idleTimeout,
			MaxIdleConnsPerHost: maxIdleConnsPerHost,
		},
		CheckRedirect: noRedirect,
	}
}

// noRedirect lets a redirect be an answer: a credential goes only to the host that it is for.
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

// Process sends the job's message and returns a [Result]. An answer about the recipient or the
// message is a permanent error. The job is throttled after a 429, deferred while no account is
// free, and retried after any other answer and after a failed connection.
func (p *Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	m, err := parsePayload(job.Payload)
	if err != nil {
		return nil, processor.Permanent(CodeBadPayload, fmt.Errorf("read push payload: %w", err))
	}
	pool := (*p.accounts.Load())[m.platform]
	if pool == nil {
		return nil, processor.Permanent(CodeNotConfigured, fmt.Errorf("push by %s: no account", m.platform))
	}
	loan, err := pool.source.Borrow(ctx)
	var denied *credential.DeniedError
	switch {
	case errors.As(err, &denied):
		return nil, processor.Deferred(denied.After, fmt.Sprintf("push by %s: %v", m.platform, denied))
	case err != nil:
		return nil, fmt.Errorf("push by %s: get account: %w", m.platform, err)
	}
	a := answer{outcome: credential.Outcome{Kind: credential.Unused}}
	defer func() { loan.Return(a.outcome) }()
	account, known := pool.members[loan.ID()]
	if !known {
		return nil, processor.Deferred(unknownAccountWait, "push by "+m.platform+": the account was removed")
	}
	a.outcome = credential.Outcome{} // if send panics
	ctx, cancel := context.WithTimeout(ctx, p.config.Timeout)
	defer cancel()
	a = account.sender.send(ctx, job, m)
	if a.err != nil {
		return nil, a.err
	}
	return Result{Platform: m.platform, Code: a.status}, nil
}
