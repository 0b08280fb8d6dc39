// Package email is the processor of the job type SEND_EMAIL: each job sends one mail by SMTP. The
// package hides its connections, which it keeps open and shares among jobs, and how replies of the
// mail server become decisions about a job.
package email

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/mail"
	"net/textproto"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
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
	from     *mail.Address
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

// These are the values of [Config.TLS]: whether and how a connection to the mail server is
// encrypted.
const (
	TLSNone          = "none"          // never
	TLSOpportunistic = "opportunistic" // with STARTTLS if the server offers it, otherwise unencrypted
	TLSMandatory     = "mandatory"     // with STARTTLS; no mail is sent if the server does not offer it
	TLSImplicit      = "implicit"      // TLS from the first byte on, usually on port 465
)

// These are the values of [Config.Auth]: how the processor authenticates to the mail server.
const (
	AuthNone    = "none"
	AuthPlain   = "plain"
	AuthLogin   = "login"
	AuthCRAMMD5 = "cram-md5"
	AuthAuto    = "auto" // the strongest mechanism that the server offers; no authentication without a user name
)

// Config says how to reach the mail server. Each field is set by an environment variable with the
// prefix SMTP_.
type Config struct {
	// AccountsFile is a YAML file that lists accounts, each at a mail server. It is read again when
	// it changes. The other variables then apply to each account that does not set the value
	// itself, but HOST, USERNAME and PASSWORD have no effect. Empty: these variables describe the
	// only account, which has no limits.
	AccountsFile string `env:"ACCOUNTS_FILE"`
	credential.Limits
	// Host is the name or IP address of the mail server. The server's certificate must be valid for
	// it.
	Host string `env:"HOST" envDefault:"127.0.0.1"`
	// Port is the TCP port of the mail server.
	Port int `env:"PORT" envDefault:"25"`
	// Username is the name to authenticate with; empty means that the processor does not
	// authenticate.
	Username string `env:"USERNAME"`
	// Password is the password to authenticate with.
	Password string `env:"PASSWORD"`
	// From is the sender of every mail, such as "Shop <shop@example.com>". Message-IDs have its
	// domain, also if an account has another sender.
	From string `env:"FROM" envDefault:"bulkaction@localhost"`
	// TLS is how the connection is encrypted: none, opportunistic, mandatory
	// (STARTTLS) or implicit.
	TLS string `env:"TLS" envDefault:"opportunistic"`
	// TLSCAFile is a PEM file. If it is set, only the certificate authorities in it are trusted; if
	// it is empty, those of the operating system are.
	TLSCAFile string `env:"TLS_CA_FILE"`
	// Auth is how to authenticate: none, plain, login, cram-md5 or auto.
	Auth string `env:"AUTH" envDefault:"auto"`
	// Timeout is the longest time to connect or to send one mail. The job's own timeout applies as
	// well.
	Timeout time.Duration `env:"TIMEOUT" envDefault:"30s"`
	// MaxConnections is how many connections one process opens at most for one account.
	MaxConnections int `env:"MAX_CONNECTIONS" envDefault:"10"`
	// MaxMessagesPerConnection is how many mails are sent over one connection before a new
	// connection replaces it; 0 means no limit.
	MaxMessagesPerConnection int `env:"MAX_MESSAGES_PER_CONNECTION" envDefault:"100"`
	// IdleTimeout is the time after which an unused connection is closed.
	IdleTimeout time.Duration `env:"IDLE_TIMEOUT" envDefault:"30s"`
	// HELO is the host name that the processor gives in the SMTP greeting; empty means the name of
	// this host.
	HELO string `env:"HELO"`
}

// Validate checks every field, but not the content of AccountsFile, because only workers can read
// it. The error joins one error for each invalid field and names the field as its environment
// variable, without the prefix.
func (c Config) Validate() error {
	var errs []error
	for _, m := range c.mistakes() {
		errs = append(errs, fmt.Errorf("%s: %w", m.field, m.err))
	}
	return errors.Join(errs...)
}

// mistake says what is wrong with a field.
type mistake struct {
	field string // as its environment variable, without the prefix
	err   error
}

func (c Config) mistakes() []mistake {
	var all []mistake
	check := func(ok bool, field, format string, args ...any) {
		if !ok {
			all = append(all, mistake{field, fmt.Errorf(format, args...)})
		}
	}
	check(c.Host != "" && !strings.Contains(c.Host, "/") && !hasControlOrSpace(c.Host),
		"HOST", "must be a host name or an IP address")
	check(c.Port >= 1 && c.Port <= 65535, "PORT", "%d is not between 1 and 65535", c.Port)
	check(slices.Contains([]string{TLSNone, TLSOpportunistic, TLSMandatory, TLSImplicit}, c.TLS),
		"TLS", "%q is not one of none, opportunistic, mandatory, implicit", c.TLS)
	check(slices.Contains([]string{AuthNone, AuthPlain, AuthLogin, AuthCRAMMD5, AuthAuto}, c.Auth),
		"AUTH", "%q is not one of none, plain, login, cram-md5, auto", c.Auth)
	listed := c.AccountsFile != "" // then each account has a host and a user name of its own
	check(c.TLS != TLSNone || c.Username == "" || (c.Auth != AuthPlain && c.Auth != AuthLogin) ||
		isLocalhost(c.Host) || listed,
		"AUTH", "%s would show the password to the network; set TLS, or use cram-md5", c.Auth)
	check(c.Username != "" || c.Auth == AuthNone || c.Auth == AuthAuto || listed,
		"USERNAME", "needed to authenticate by %s", c.Auth)
	check(c.Timeout > 0, "TIMEOUT", "%s is not above 0", c.Timeout)
	check(c.IdleTimeout > 0, "IDLE_TIMEOUT", "%s is not above 0", c.IdleTimeout)
	check(c.MaxConnections >= 1, "MAX_CONNECTIONS", "%d is not above 0", c.MaxConnections)
	check(c.MaxMessagesPerConnection >= 0, "MAX_MESSAGES_PER_CONNECTION", "%d is negative", c.MaxMessagesPerConnection)
	check(!hasControlOrSpace(c.HELO), "HELO", "must not contain spaces or control characters")
	_, err := parseSender(c.From)
	check(err == nil, "FROM", "%q is not an e-mail address in ASCII", c.From)
	_, err = c.tlsConfig()
	check(err == nil, "TLS_CA_FILE", "%w", err)
	return all
}

func (c Config) tlsConfig() (*tls.Config, error) {
	config := &tls.Config{
		ServerName: c.Host, MinVersion: tls.VersionTLS12,
		ClientSessionCache: tls.NewLRUClientSessionCache(0), // a new connection resumes an earlier TLS session
	}
	if c.TLSCAFile == "" {
		return config, nil
	}
	pem, err := os.ReadFile(c.TLSCAFile)
	if err != nil {
		return nil, err
	}
	config.RootCAs = x509.NewCertPool()
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no PEM certificate", c.TLSCAFile)
	}
	return config, nil
}

// isLocalhost says whether go-mail would send a password unencrypted to this host. It repeats
// go-mail's own rule.
func isLocalhost(host string) bool {
	return host == "localhost" || host == "127.0.0.1" || host == "::1"
}

func hasControlOrSpace(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f })
}

// file is the accounts file.
type file struct {
	Accounts []entry `yaml:"accounts"`
}

type entry struct {
	accountsfile.Entry `yaml:",inline"`
	Host               string `yaml:"host"`
	Port               *int   `yaml:"port"`
	Username           string `yaml:"username"`
	Password           string `yaml:"password"`
	PasswordFile       string `yaml:"password_file"`
	From               string `yaml:"from"`
	TLS                string `yaml:"tls"`
	Auth               string `yaml:"auth"`
}

// Reload reads the accounts file and the passwords again, and uses the accounts if they have no
// mistake. If the files have not changed since the last call, it does nothing, so a mistake is
// returned once; but after an error of the Choice it tries again. It waits until the idle
// connections of changed or removed accounts are closed; their other connections are closed when
// their mail is sent.
func (a *Accounts) Reload() (changed bool, err error) { return a.file.Reload() }

// load reads the accounts file. It returns the function that lets jobs use its accounts.
func (a *Accounts) load(r *accountsfile.Reader) (use func() error) {
	var f file
	if r.Decode(&f) && len(f.Accounts) == 0 {
		r.Mistake("the file lists no account under accounts")
	}
	list := make([]member, len(f.Accounts))
	for i, e := range f.Accounts {
		c, account := r.Account("", i, e.Entry)
		list[i] = member{account: account, config: a.configOf(c, e)}
	}
	return func() error {
		before := a.current.Load()
		after, err := a.use(list, before.members)
		if err != nil {
			return err
		}
		a.current.Store(after)
		closeRemoved(before.members, after.members)
		return nil
	}
}

// configOf returns the configuration of one account in the file: the values of its entry, and those
// of a.config for the others, but never its host, user name or password. It reports mistakes to c.
func (a *Accounts) configOf(c *accountsfile.Checker, e entry) Config {
	config := a.config
	config.AccountsFile = ""
	config.Host, config.Username, config.Password = e.Host, e.Username, e.Password
	if e.Port != nil {
		config.Port = *e.Port
	}
	config.From, config.TLS = cmp.Or(e.From, config.From), cmp.Or(e.TLS, config.TLS)
	config.Auth = cmp.Or(e.Auth, config.Auth)

	given := e.Password != "" || e.PasswordFile != ""
	c.Check(e.Password == "" || e.PasswordFile == "", "password: set either it or password_file, not both")
	c.Check(given || e.Username == "" || config.Auth == AuthNone, "password or password_file is missing")
	c.Check(!given || e.Username != "", "username is missing")
	if e.PasswordFile != "" {
		content := c.Secret("password_file", e.PasswordFile)
		config.Password = strings.TrimRight(string(content), "\r\n")
		c.Check(content == nil || config.Password != "", "password_file: has no password")
	}
	for _, m := range config.mistakes() {
		c.Check(false, "%s: %w", strings.ToLower(m.field), m.err)
	}
	return config
}

// use returns the accounts of a list, with a source that lends them. An account whose configuration
// is the same as in before keeps its processor.
func (a *Accounts) use(list []member, before map[string]member) (*accounts, error) {
	after := &accounts{members: map[string]member{}}
	choices := make([]credential.Account, len(list))
	for i, m := range list {
		choices[i] = m.account
		if old := before[m.account.ID]; old.config == m.config {
			m.processor = old.processor
		} else {
			p, err := New(m.config)
			if err != nil {
				return nil, fmt.Errorf("account %s: %w", m.account.ID, err)
			}
			p.idSender = a.idSender
			m.processor = p
		}
		after.members[m.account.ID] = m
	}
	var err error
	if after.source, err = a.choose(poolName, choices); err != nil {
		return nil, fmt.Errorf("choose among the e-mail accounts: %w", err)
	}
	return after, nil
}

// closeRemoved closes the connections of the accounts in before whose processor is not used in
// after.
func closeRemoved(before, after map[string]member) {
	var closing sync.WaitGroup
	for id, m := range before {
		if after[id].processor != m.processor {
			closing.Go(func() { _ = m.processor.Close() }) // never fails
		}
	}
	closing.Wait()
}

// throttledWait is how long an account is not used after a 421 that says "too many".
const throttledWait = time.Minute

// errAccountGone is the error of a job whose account was changed or removed after Admit. It defers
// the job.
var errAccountGone = processor.Deferred(0, "send mail: the account was changed or removed")

// answer turns the error of a step of sending into the error that decides about the job: permanent
// for a 5xx reply about the mail and for an address that the server can't take, otherwise retry.
// The code for a reply is, for example, SMTP_550. If ctx has ended before a reply, it is the error
// of ctx.
func answer(ctx context.Context, at step, err error) error {
	action, on5xx := "send mail", processor.Permanent
	if at == connecting {
		action, on5xx = "connect to mail server", processor.Retry
	}
	var reply *textproto.Error
	switch {
	case errors.Is(err, errNeedsUTF8):
		return processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("%s: %w", action, err))
	case errors.As(err, &reply):
		code := "SMTP_" + strconv.Itoa(reply.Code)
		err = fmt.Errorf("%s: server replied %d %s", action, reply.Code, redact(reply.Msg))
		if reply.Code >= 500 {
			return on5xx(code, err)
		}
		return processor.Retry(code, err)
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", action, ctx.Err())
	}
	return processor.Retry(CodeUnreachable, fmt.Errorf("%s: %w", action, err))
}

// verdict is answer for a job that was sent with an account: its error also says what the failure
// shows about the account, and so may decide differently about the job.
//
//	421 with "too many"            Throttled; the job is deferred, for another account
//	other 421                      Failure
//	552 on MAIL                    Neutral: the mail is too large
//	4xx, 5xx before or on MAIL     Failure; the job is retried, perhaps with another account
//	4xx, 5xx after MAIL            Neutral: they are about the recipient or the mail
//	SMTPUTF8 is not supported      Neutral
//	no connection, or no reply     Failure
//	no connection was free         Unused
//	the account has been removed   Unused, and the job is deferred
//	the end of a cancelled ctx     Neutral
func verdict(ctx context.Context, at step, err error) error {
	result := answer(ctx, at, err)
	var reply *textproto.Error
	switch {
	case errors.Is(err, errClosed):
		return errAccountGone
	case errors.Is(err, errBusy):
		return credential.Verdict(result, credential.Outcome{Kind: credential.Unused})
	case !errors.As(err, &reply):
		return result // credential.OutcomeOf says the same as the table
	case reply.Code != codeShuttingDown && at == sending, reply.Code == codeTooLarge:
		return credential.Verdict(result, credential.Outcome{Kind: credential.Neutral})
	case reply.Code == codeShuttingDown && strings.Contains(strings.ToLower(reply.Msg), "too many"):
		result = processor.Deferred(0, result.Error())
		return credential.Verdict(result, credential.Outcome{Kind: credential.Throttled, After: throttledWait})
	}
	result = processor.Retry("SMTP_"+strconv.Itoa(reply.Code), result)
	return credential.Verdict(result, credential.Outcome{Kind: credential.Failure})
}

func invalidPayload(err error) error {
	return processor.Permanent(processor.CodeInvalidPayload, fmt.Errorf("compose mail: %w", err))
}

var address = regexp.MustCompile(`[^\s<>()"',;:]+@[^\s<>()"',;:]+`)

// redact returns a server's reply as one line without mail addresses, because errors are logged.
func redact(reply string) string {
	return address.ReplaceAllLiteralString(strings.ReplaceAll(reply, "\n", " "), "[address]")
}
