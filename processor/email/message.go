package email

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	stdmail "net/mail"
	"net/url"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/wneessen/go-mail"
	"golang.org/x/net/idna"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/internal/jsonscan"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

const (
	maxAddressBytes = 254 // without the angle brackets (RFC 5321, 4.5.3.1.3)
	maxHeaderBytes  = 900 // of a subject or list_unsubscribe: a header line may have 998 bytes
	defaultBody     = "This message has no text.\n"
)

// message is a mail that is ready to be sent.
type message struct {
	result  Result // of the job when the mail is sent
	to      string // the recipient as the RCPT command needs it
	utf8    bool   // an address is not ASCII, so the server must support SMTPUTF8
	content *mail.Msg
}

// request is the content of a payload.
type request struct {
	to, replyTo         *stdmail.Address // replyTo may be nil
	subject, body, html string
	page, mailto        string // to unsubscribe: an https URL and a mailto URL; "" for none
}

// parsePayload reads a payload. If no mail can be made from it, the error says why, and contains no
// part of the payload.
func parsePayload(content []byte) (request, error) {
	var payload struct {
		To              string `json:"to"`
		Subject         string `json:"subject"`
		Body            string `json:"body"`
		HTML            string `json:"html"`
		ReplyTo         string `json:"reply_to"`
		ListUnsubscribe string `json:"list_unsubscribe"`
	}
	if err := jsonscan.Decode("", content, &payload); err != nil {
		return request{}, err
	}
	r := request{subject: payload.Subject, body: payload.Body, html: payload.HTML}
	var wrongTo, wrongReply, wrongList error
	r.to, wrongTo = parseAddress("to", payload.To)
	if payload.ReplyTo != "" {
		r.replyTo, wrongReply = parseAddress("reply_to", payload.ReplyTo)
	}
	r.page, r.mailto, wrongList = parseUnsubscribe(payload.ListUnsubscribe)
	switch {
	case payload.To == "":
		return request{}, errors.New("to is missing")
	case len(payload.Subject) > maxHeaderBytes:
		return request{}, fmt.Errorf("subject is longer than %d bytes", maxHeaderBytes)
	case strings.ContainsFunc(payload.Subject, isControl):
		return request{}, errors.New("subject has a line break or another control character")
	}
	return r, cmp.Or(wrongTo, wrongReply, wrongList)
}

// parseAddress parses the address in a field. Its domain becomes ASCII (xn--), which each mail server
// takes.
func parseAddress(field, text string) (*stdmail.Address, error) {
	a, err := stdmail.ParseAddress(text)
	if err != nil {
		return nil, fmt.Errorf("%s is not an e-mail address", field)
	}
	if at := strings.LastIndexByte(a.Address, '@') + 1; !isASCII(a.Address[at:]) {
		domain, err := idna.Lookup.ToASCII(a.Address[at:])
		if err != nil {
			return nil, fmt.Errorf("%s has a domain that is not valid", field)
		}
		a.Address = a.Address[:at] + domain
	}
	if len(a.Address) > maxAddressBytes || len(a.Name) > maxAddressBytes {
		return nil, fmt.Errorf("%s has a name or an address of more than %d bytes", field, maxAddressBytes)
	}
	return a, nil
}

// parseSender parses the sender's address, all of which must be ASCII in the end.
func parseSender(text string) (*stdmail.Address, error) {
	a, err := parseAddress("FROM", text)
	if err == nil && !isASCII(a.Address) {
		err = errors.New("FROM is not ASCII before the @")
	}
	return a, err
}

// parseUnsubscribe parses how to unsubscribe: an https URL, a mailto URL, or both with a space
// between them. They may be written as the header has them, with <, > and a comma.
func parseUnsubscribe(text string) (page, mailto string, err error) {
	if len(text) > maxHeaderBytes {
		return "", "", fmt.Errorf("list_unsubscribe is longer than %d bytes", maxHeaderBytes)
	}
	for uri := range strings.FieldsSeq(text) {
		uri = strings.Trim(uri, "<>,")
		u, err := url.Parse(uri)
		switch {
		case err != nil || !isASCII(uri) || strings.ContainsAny(uri, `<>"\`):
			return "", "", errors.New("list_unsubscribe has a URL with characters that must be escaped")
		case u.Scheme == "https" && u.Hostname() != "" && page == "":
			page = uri
		case u.Scheme == "mailto" && strings.Contains(u.Opaque, "@") && mailto == "":
			mailto = uri
		default:
			return "", "", errors.New("list_unsubscribe is not one https URL, one mailto URL, or both with a space between them")
		}
	}
	return page, mailto, nil
}

// compose makes the job's mail. An empty subject or body gets a default text. Nothing in a payload
// can add a header: the address was parsed and is formatted again, a subject with control
// characters was refused, and the body is encoded.
func (p *Processor) compose(job processor.Job, r request) *message {
	if r.subject == "" {
		r.subject = "Message from " + p.senderName()
	}
	if r.body == "" && r.html == "" {
		r.body = defaultBody
	}

	id := messageID(job, p.idSender)
	content := mail.NewMsg(mail.WithNoDefaultUserAgent())
	content.FromMailAddress(p.from)
	content.ToMailAddress(r.to)
	content.Subject(r.subject)
	content.SetDate()
	content.SetMessageIDWithValue(id)
	switch {
	case r.body == "":
		content.SetBodyString(mail.TypeTextHTML, r.html)
	case r.html == "":
		content.SetBodyString(mail.TypeTextPlain, r.body)
	default:
		content.SetBodyString(mail.TypeTextPlain, r.body)
		content.AddAlternativeString(mail.TypeTextHTML, r.html)
	}
	utf8 := !isASCII(r.to.Address)
	if r.replyTo != nil {
		content.ReplyToMailAddress(r.replyTo)
		utf8 = utf8 || !isASCII(r.replyTo.Address)
	}
	if r.page != "" {
		_ = content.SetListUnsubscribeOneClick(r.page, r.mailto) // no error: r.page is an https URL
	} else if r.mailto != "" {
		content.SetListUnsubscribe(r.mailto)
	}
	return &message{
		result: Result{MessageID: "<" + id + ">", To: r.to.Address, Subject: r.subject},
		to:     path(r.to.Address), utf8: utf8, content: content,
	}
}

func (p *Processor) senderName() string {
	if p.from.Name != "" {
		return p.from.Name
	}
	return p.from.Address
}

// messageID returns a Message-ID: the job's id, @, and the sender's domain. The part before @ may
// not begin with a dot or have two dots in a row, and the group of a job that another program has
// stored may have any byte. Such dots and bytes become ~ and two hex digits. Ids of jobs contain no
// ~, so different jobs never share a Message-ID.
func messageID(job processor.Job, sender string) string {
	id := job.ID()
	var b strings.Builder
	for i := range len(id) {
		c := id[i]
		switch {
		case c == '.' && i > 0 && id[i-1] != '.',
			c == '-', c == '_', '0' <= c && c <= '9', 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "~%02x", c)
		}
	}
	b.WriteString(sender[strings.LastIndexByte(sender, '@'):])
	return b.String()
}

// path formats an address as the SMTP commands MAIL and RCPT need it: quoted where necessary, in
// angle brackets.
func path(address string) string {
	return (&stdmail.Address{Address: address}).String()
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

func isASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r >= utf8.RuneSelf })
}

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
