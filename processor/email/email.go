// Package email is the processor of the job type SEND_EMAIL: each job sends one mail by SMTP. The
// package hides its connections, which it keeps open and shares among jobs, and how replies of the
// mail server become decisions about a job.
package email

import (
	"context"
	"fmt"
	stdmail "net/mail"

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
//	to                one address
//	subject           text without line breaks; optional
//	body              plain text; optional
//	html              the same as HTML; optional
//	reply_to          one address; optional
//	list_unsubscribe  an https URL, a mailto URL, or both with a space between them; optional
type Processor struct {
	from     *stdmail.Address
	sender   string // the sender's address as the MAIL command needs it
	idSender string // the address whose domain Message-IDs have
	pool     *pool
}

// New returns a processor. It connects when the first job runs. The error names every invalid
// field.
func New(config Config) (*Processor, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure e-mail: %w", err)
	}
	from, err := parseSender(config.From)
	if err != nil {
		return nil, fmt.Errorf("configure e-mail: %w", err)
	}
	d, err := newDialer(config)
	if err != nil {
		return nil, fmt.Errorf("configure e-mail: %w", err)
	}
	return &Processor{
		from: from, sender: path(from.Address), idSender: from.Address,
		pool: &pool{dial: d.dial, idleFor: config.IdleTimeout, slots: make(chan struct{}, config.MaxConnections)},
	}, nil
}

// Type is SEND_EMAIL.
func (p *Processor) Type() string { return Type }

// Close closes the idle connections and waits until they are closed. It does not wait for
// connections in use: each is closed when its mail is sent. A job that starts later gets an error
// that means "retry".
func (p *Processor) Close() error {
	p.pool.close()
	return nil
}

// Process sends the job's mail and returns a [Result]. A payload from which no mail can be made, or
// with an address that the server can't take because it is not ASCII, is the permanent error
// INVALID_PAYLOAD. A 4xx reply means retry and a 5xx reply is a permanent
// error, with a code such as SMTP_550. A failed connection means retry, and so does any refusal
// before the mail itself, for example of the password: the job did not cause it.
func (p *Processor) Process(ctx context.Context, job processor.Job) (any, error) {
	r, err := parsePayload(job.Payload)
	if err != nil {
		return nil, invalidPayload(err)
	}
	m := p.compose(job, r)
	if at, err := p.send(ctx, m); err != nil {
		return nil, answer(ctx, at, err)
	}
	return m.result, nil
}

// send sends a mail over one of the processor's connections. If the server had closed an idle
// connection, it takes another one. If there is an error, at is the step that failed.
func (p *Processor) send(ctx context.Context, m *message) (at step, err error) {
	for {
		c, reused, err := p.pool.get(ctx)
		if err != nil {
			return connecting, err
		}
		at, err := c.send(ctx, p.sender, m)
		broken := c.broken
		p.pool.put(c)
		if at == namingSender && broken && reused && ctx.Err() == nil {
			continue // the server had closed the idle connection; a new one gets no second try
		}
		return at, err
	}
}
