package email

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// poolName is the name of the pool of accounts.
const poolName = "smtp"

// Accounts is a processor of SEND_EMAIL jobs like [Processor], but sends with several accounts from
// a YAML file. Any of them can send any mail. Each account has its own sender and connections.
type Accounts struct {
	config   Config
	idSender string // see Processor
	choose   credential.Choice
	current  atomic.Pointer[accounts]
	file     *accountsfile.File
}

// accounts are the accounts that are in use.
type accounts struct {
	source  credential.Source
	members map[string]member // by id
}

// member is one account of the file. If a change of the file does not concern an account, it keeps
// its processor and so its connections.
type member struct {
	account   credential.Account
	config    Config // with the password
	processor *Processor
}

// Option changes an [Accounts].
type Option func(*Accounts)

// WithChoice sets how the account for each mail is chosen. The pool of accounts is named smtp.
// Without this option, each process uses the accounts in turn.
func WithChoice(c credential.Choice) Option { return func(a *Accounts) { a.choose = c } }

// NewAccounts returns a processor with the accounts in config.AccountsFile. It connects when the
// first job runs. The error names every invalid field, or every mistake in the accounts file.
func NewAccounts(config Config, options ...Option) (*Accounts, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure e-mail: %w", err)
	}
	from, err := parseSender(config.From)
	if err != nil {
		return nil, fmt.Errorf("configure e-mail: FROM: %w", err)
	}
	a := &Accounts{config: config, idSender: from.Address, choose: credential.TakeTurns}
	for _, option := range options {
		option(a)
	}
	a.current.Store(&accounts{})
	a.file = accountsfile.NewFile(config.AccountsFile, "e-mail accounts", a.load)
	if _, err := a.Reload(); err != nil {
		return nil, err
	}
	return a, nil
}

// Type is SEND_EMAIL.
func (a *Accounts) Type() string { return Type }

// Close closes the idle connections and waits until they are closed. It does not wait for
// connections in use: each is closed when its mail is sent. A job that starts later is deferred.
func (a *Accounts) Close() error {
	a.file.Close(func() { closeRemoved(a.current.Load().members, nil) })
	return nil
}

// Admit borrows one of the accounts, each of which may send any mail, and returns it as the pass.
// For a payload from which no mail can be made it returns no pass: Process then fails the job.
func (a *Accounts) Admit(ctx context.Context, job processor.Job) (processor.Pass, error) {
	if _, err := parsePayload(job.Payload); err != nil {
		return nil, nil
	}
	return credential.Admit(ctx, a.current.Load().source, func(id string) bool {
		return a.file.Knows(func() bool {
			_, known := a.member(id)
			return known
		})
	})
}

// Availability says how many mails can be sent.
func (a *Accounts) Availability() processor.Availability {
	return credential.AvailabilityOf(a.current.Load().source)
}

func (a *Accounts) member(id string) (m member, known bool) {
	m, known = a.current.Load().members[id]
	return m, known
}

// Process sends the job's mail with the account that Admit got, and returns a [Result]. It decides
// about the job as [Processor.Process] does, with these exceptions. The job is deferred after a 421
// that says "too many", and if the account was changed, removed or turned out to fail. It is
// retried after a 5xx reply to MAIL, except 552 (too large).
func (a *Accounts) Process(ctx context.Context, job processor.Job) (any, error) {
	r, err := parsePayload(job.Payload)
	if err != nil {
		return nil, invalidPayload(err)
	}
	loan, err := credential.From(ctx)
	if err != nil {
		return nil, err
	}
	if loan == nil {
		return nil, errors.New("send mail: no account: Admit was not called")
	}
	account, known := a.member(loan.ID())
	if !known {
		return nil, errAccountGone
	}
	m := account.processor.compose(job, r)
	if at, err := account.processor.send(ctx, m); err != nil {
		return nil, verdict(ctx, at, err)
	}
	return m.result, nil
}
