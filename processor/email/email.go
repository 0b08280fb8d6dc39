// Package email is the processor of the job type SEND_EMAIL: each job sends one mail by SMTP. The
// package hides its connections, which it keeps open and shares among jobs, and how replies of the
// mail server become decisions about a job.
package email

import (
	"context"
	"errors"
	"fmt"
	stdmail "net/mail"
	"net/textproto"
	"regexp"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/processor"
)

// Type is the job type that the processor serves.
const Type = "SEND_EMAIL"

// CodeUnreachable is the error code when a connection could not be opened or failed; the job is
// retried. A refusal by the server has the code SMTP_ and the number of its reply, such as
// SMTP_451.
const CodeUnreachable = "SMTP_UNREACHABLE"

// Result is the result of a job that is done.
type Result struct {
	// MessageID is the mail's Message-ID header. It is derived from the job's id: if a mail is sent
	// twice because the server's answer was lost, both copies have the same Message-ID.
	MessageID string `json:"message_id"`
	To        string `json:"to"`      // the recipient's address, without the name
	Subject   string `json:"subject"` // as the mail has it, also when the payload has none
}

// Processor runs SEND_EMAIL jobs. The payload is a JSON object with these members:
//
//	to       one address
//	subject  text without line breaks; optional
//	body     plain text; optional
type Processor struct {
	from   *stdmail.Address
	sender string // the sender's address as the MAIL command needs it
	pool   *pool
}

// New returns a processor. It connects when the first job runs. The error names every invalid
// field.
func New(config Config) (*Processor, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure e-mail: %w", err)
	}
	from, err := stdmail.ParseAddress(config.From)
	if err != nil {
		return nil, fmt.Errorf("configure e-mail: FROM: %w", err)
	}
	d, err := newDialer(config)
	if err != nil {
		return nil, fmt.Errorf("configure e-mail: %w", err)
	}
	return &Processor{
		from: from, sender: path(from.Address),
		pool: &pool{dial: d.dial, idleFor: config.IdleTimeout, slots: make(chan struct{}, config.MaxConnections)},
	}, nil
}

// Type is SEND_EMAIL.
func (p *Processor) Type() string { return Type }

// Close closes the idle connections and waits until they are closed. It does not wait for the
// others: each is closed when its mail is sent. A job that starts later gets an error that means
// "retry".
func (p *Processor) Close() error {
	p.pool.close()
	return nil
}

// Process sends the job's mail and returns a [Result]. A payload from which no mail can be made is
// the permanent error INVALID_PAYLOAD. A 4xx reply means retry and a 5xx reply is a permanent
// error, with a code such as SMTP_550. A failed connection means retry, and so does any refusal
// before the mail itself, for example of the password: the job did not cause it.
func (p *Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	m, err := p.compose(job)
	if err != nil {
		return nil, processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("compose mail: %w", err))
	}
	for {
		c, reused, err := p.pool.get(ctx)
		if err != nil {
			return nil, answer(ctx, "connect to mail server", err, processor.Retry)
		}
		stale, err := c.send(ctx, p.sender, m)
		p.pool.put(c)
		switch {
		case err == nil:
			return m.result, nil
		case stale && reused && ctx.Err() == nil:
			continue // the server had closed the idle connection; a new connection is never stale
		case errors.Is(err, errNeedsUTF8):
			return nil, processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("send mail: %w", err))
		}
		return nil, answer(ctx, "send mail", err, processor.Permanent)
	}
}

// answer turns the error of a step into the processor's error. on5xx says what a 5xx reply means in
// this step.
func answer(ctx context.Context, step string, err error, on5xx func(string, error) error) error {
	var reply *textproto.Error
	switch {
	case errors.As(err, &reply):
		code := "SMTP_" + strconv.Itoa(reply.Code)
		err = fmt.Errorf("%s: server replied %d %s", step, reply.Code, redact(reply.Msg))
		if reply.Code >= 500 {
			return on5xx(code, err)
		}
		return processor.Retry(code, err)
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", step, ctx.Err())
	}
	return processor.Retry(CodeUnreachable, fmt.Errorf("%s: %w", step, err))
}

var address = regexp.MustCompile(`[^\s<>()"',;:]+@[^\s<>()"',;:]+`)

// redact returns a server's reply as one line without mail addresses, because errors are logged.
func redact(reply string) string {
	return address.ReplaceAllLiteralString(strings.ReplaceAll(reply, "\n", " "), "[address]")
}
