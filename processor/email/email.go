// Package email is the processor of the job type SEND_EMAIL: it sends one mail a job by SMTP. It
// hides the connections, which it keeps open and shares among jobs, and what the server's replies
// mean for a job.
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

// CodeUnreachable is the code of a retry after a connection that failed, or could not be made. A
// reply of the server has the code SMTP_ and its number, such as SMTP_451.
const CodeUnreachable = "SMTP_UNREACHABLE"

// Result is a done job's result.
type Result struct {
	// MessageID is the mail's Message-ID header. It is made of the job's id, so that a mail which
	// was sent twice, because the server's answer was lost, can be told from two mails.
	MessageID string `json:"message_id"`
}

// Processor serves SEND_EMAIL. Its payload is {"to": …, "subject"?: …, "body"?: …}: one address, a
// line and plain text.
type Processor struct {
	from   *stdmail.Address
	sender string // from as MAIL wants it
	pool   *pool
}

// New makes a processor; it does not connect before the first job. The error names every bad field.
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

// Close ends the idle connections, and those in use once their mail is sent. Later jobs are
// answered with a retry.
func (p *Processor) Close() error {
	p.pool.close()
	return nil
}

// Process sends the job's mail and returns a [Result]. A payload that makes no mail is a permanent
// INVALID_PAYLOAD; a 4xx reply is a retry and a 5xx reply permanent, with a code such as SMTP_550.
// A connection that fails is a retry, and so is any refusal before the mail itself, such as of the
// password: that is not the job's fault.
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
			return Result{MessageID: m.id}, nil
		case stale && reused && ctx.Err() == nil:
			continue // the server had hung up; ends at the latest with a new connection
		case errors.Is(err, errNeedsUTF8):
			return nil, processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("send mail: %w", err))
		}
		return nil, answer(ctx, "send mail", err, processor.Permanent)
	}
}

// answer turns a failed step into the processor's answer; on5xx says what a 5xx reply means there.
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

// redact makes a server's reply one line without addresses: it goes into errors, which are logged.
func redact(reply string) string {
	return address.ReplaceAllLiteralString(strings.ReplaceAll(reply, "\n", " "), "[address]")
}
