package email

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/wneessen/go-mail"
	"github.com/wneessen/go-mail/smtp"
)

const (
	quitTimeout      = 2 * time.Second // the longest time for the QUIT command
	codeShuttingDown = 421             // the server closes the connection after this reply
	codeTooLarge     = 552             // the mail is larger than the server or the mailbox allows
	hidden           = "[password]"
)

// tlsOptions holds go-mail's option for each value of [Config.TLS].
var tlsOptions = map[string]mail.Option{
	TLSNone:          mail.WithTLSPolicy(mail.NoTLS),
	TLSOpportunistic: mail.WithTLSPolicy(mail.TLSOpportunistic),
	TLSMandatory:     mail.WithTLSPolicy(mail.TLSMandatory),
	TLSImplicit:      mail.WithSSL(),
}

// authOptions holds go-mail's option for each value of [Config.Auth] but AuthNone.
var authOptions = map[string]mail.Option{
	AuthPlain:   mail.WithSMTPAuth(mail.SMTPAuthPlain),
	AuthLogin:   mail.WithSMTPAuth(mail.SMTPAuthLogin),
	AuthCRAMMD5: mail.WithSMTPAuth(mail.SMTPAuthCramMD5),
	AuthAuto:    mail.WithOpportunisticSMTPAuth(autoAuth...),
}

// autoAuth lists the mechanisms of AuthAuto, the strongest first. go-mail refuses to send a
// password unencrypted, except to localhost.
var autoAuth = []mail.SMTPAuthType{
	mail.SMTPAuthSCRAMSHA256PLUS, mail.SMTPAuthSCRAMSHA256, mail.SMTPAuthSCRAMSHA1PLUS, mail.SMTPAuthSCRAMSHA1,
	mail.SMTPAuthCramMD5, mail.SMTPAuthPlain, mail.SMTPAuthLogin,
}

// dialer opens connections and prepares them for the first mail.
type dialer struct {
	config  Config
	tls     *tls.Config
	options []mail.Option
	secrets *strings.Replacer // hides the password; nil: there is none
}

func newDialer(config Config) (*dialer, error) {
	password := config.Password
	tlsConfig, err := config.tlsConfig()
	if err != nil {
		return nil, err
	}
	d := &dialer{config: config, tls: tlsConfig, options: []mail.Option{
		mail.WithPort(config.Port), mail.WithTimeout(config.Timeout), mail.WithTLSConfig(tlsConfig),
		mail.WithUsername(config.Username), mail.WithPassword(password), tlsOptions[config.TLS],
	}}
	if config.HELO != "" {
		d.options = append(d.options, mail.WithHELO(config.HELO))
	}
	if password != "" {
		encode := base64.StdEncoding.EncodeToString
		d.secrets = strings.NewReplacer(
			encode([]byte("\x00"+config.Username+"\x00"+password)), hidden, // AUTH PLAIN
			encode([]byte(password)), hidden, // AUTH LOGIN
			password, hidden,
		)
	}
	if config.Username != "" && config.Auth != AuthNone {
		d.options = append(d.options, authOptions[config.Auth])
	}
	return d, nil
}

// dial connects, greets the server, encrypts and authenticates. go-mail observes the context only
// while it connects, and it does not close the socket when a later step fails. Therefore dial keeps
// the socket and closes it in both cases.
func (d *dialer) dial(ctx context.Context) (*conn, error) {
	address := net.JoinHostPort(d.config.Host, strconv.Itoa(d.config.Port))
	var raw net.Conn
	var unwatch func() bool
	open := func(dialCtx context.Context, _, _ string) (net.Conn, error) {
		socket, err := new(net.Dialer).DialContext(dialCtx, "tcp", address)
		if err != nil {
			return nil, err
		}
		raw, unwatch = socket, closeAfter(ctx, socket)
		if d.config.TLS != TLSImplicit {
			return socket, nil
		}
		encrypted := tls.Client(socket, d.tls)
		return encrypted, encrypted.HandshakeContext(dialCtx)
	}
	// go-mail changes the client while it negotiates, so each connection needs a client of its own.
	client, err := mail.NewClient(d.config.Host, append(slices.Clip(d.options), mail.WithDialContextFunc(open))...)
	if err != nil {
		return nil, err
	}
	session, err := client.DialToSMTPClientWithContext(ctx)
	if raw != nil && !unwatch() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		if raw != nil {
			_ = raw.Close()
		}
		return nil, d.hideSecrets(err)
	}
	return &conn{raw: raw, session: session, config: &d.config}, nil
}

// hideSecrets removes the password from an error: some servers repeat a command that they refuse.
func (d *dialer) hideSecrets(err error) error {
	if d.secrets == nil {
		return err
	}
	text := err.Error()
	shown := d.secrets.Replace(text)
	var reply *textproto.Error
	switch {
	case shown == text:
		return err
	case errors.As(err, &reply):
		return &textproto.Error{Code: reply.Code, Msg: d.secrets.Replace(reply.Msg)}
	}
	return errors.New(shown)
}

// closeAfter closes the socket when ctx ends, so that a blocked read or write on the socket
// returns. The returned function cancels this; it returns false if ctx has already ended.
func closeAfter(ctx context.Context, socket net.Conn) (cancel func() bool) {
	return context.AfterFunc(ctx, func() { _ = socket.Close() })
}

// conn is one connection with its SMTP session. Only one goroutine may use it at a time.
type conn struct {
	raw     net.Conn // the TCP connection below TLS
	session *smtp.Client
	config  *Config
	sent    int         // number of mails, refused ones included
	broken  bool        // the connection can't be used for another mail
	expiry  *time.Timer // the pool's idle timer
}

var errNeedsUTF8 = errors.New("the mail server takes no address that is not ASCII")

// step is how far a mail has come.
type step int

const (
	connecting   step = iota // the connection is not yet open and authenticated
	namingSender             // the server has not accepted the MAIL command
	sending                  // the server has accepted the MAIL command
)

// send sends one mail in as few round trips as SMTP allows without pipelining: it sends RSET only
// after a refusal, and it does not probe the connection first. If there is an error, at is the step
// that failed. A failure at namingSender can be repeated over another connection without sending
// the mail twice.
func (c *conn) send(ctx context.Context, from string, m *message) (at step, err error) {
	cancel := closeAfter(ctx, c.raw)
	defer func() {
		if !cancel() {
			c.broken = true
		}
	}()
	c.sent++
	if m.utf8 {
		if offered, _ := c.session.Extension("SMTPUTF8"); !offered {
			return namingSender, errNeedsUTF8
		}
	}
	c.session.SkipSMTPUTF8(!m.utf8)
	if err := c.session.UpdateDeadline(c.config.Timeout); err != nil {
		c.judge(err)
		return namingSender, err
	}
	if err := c.session.Mail(from); err != nil {
		c.judge(err)
		return namingSender, err
	}
	if err := c.session.Rcpt(m.to); err != nil {
		return sending, c.abort(err)
	}
	body, err := c.session.Data()
	if err != nil {
		return sending, c.abort(err)
	}
	if _, err := m.content.WriteTo(body); err != nil {
		c.broken = true
		return sending, err
	}
	if err := body.Close(); err != nil {
		c.judge(err)
		return sending, err
	}
	return sending, nil
}

// judge sets and returns whether the connection is broken after err. It can still be used after a
// 4xx or 5xx reply, except 421: then the server closes the connection.
func (c *conn) judge(err error) (broken bool) {
	var reply *textproto.Error
	refused := errors.As(err, &reply) && reply.Code >= 400 && reply.Code < 600
	c.broken = !refused || reply.Code == codeShuttingDown
	return c.broken
}

// abort prepares the connection for the next mail after a command of this mail has failed with err:
// it sends RSET if the connection is not broken. It returns err.
func (c *conn) abort(err error) error {
	if !c.judge(err) && c.session.Reset() != nil {
		c.broken = true
	}
	return err
}

// atLimit returns true when the connection has sent MaxMessagesPerConnection mails, refused ones
// included; false without a limit.
func (c *conn) atLimit() bool {
	limit := c.config.MaxMessagesPerConnection
	return limit > 0 && c.sent >= limit
}

// quit sends QUIT, waits a short time for the reply, and closes the connection.
func (c *conn) quit() {
	_ = c.raw.SetDeadline(time.Now().Add(quitTimeout))
	_ = c.session.Quit()
	_ = c.raw.Close()
}

var (
	errClosed = errors.New("the processor is closed")
	errBusy   = errors.New("wait for a connection") // all are in use
)

// pool keeps idle SMTP connections for reuse and bounds the number of connections. It reuses the
// most recently used connection first, so that connections that are not needed reach their idle
// timeout.
type pool struct {
	dial    func(context.Context) (*conn, error)
	idleFor time.Duration
	slots   chan struct{} // one element for each connection that is in use or being opened

	mu      sync.Mutex
	closed  bool
	idle    []*conn
	closing sync.WaitGroup // connections on which QUIT is being sent
}

// get returns an idle connection, or opens a new one if none is idle. While MaxConnections are in
// use, it waits for one, at most until ctx ends. It fails if the pool is closed. reused says that
// the connection was idle: the server may have closed it since. The caller must give each
// connection back with put.
func (p *pool) get(ctx context.Context) (c *conn, reused bool, err error) {
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, false, fmt.Errorf("%w: %w", errBusy, ctx.Err())
	}
	c, err = p.takeIdle()
	if c != nil {
		return c, true, nil
	}
	if err == nil {
		c, err = p.dial(ctx)
	}
	if err != nil {
		<-p.slots
		return nil, false, err
	}
	return c, false, nil
}

func (p *pool) takeIdle() (*conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errClosed
	}
	if len(p.idle) == 0 {
		return nil, nil
	}
	last := len(p.idle) - 1
	c := p.idle[last]
	p.idle = p.idle[:last]
	c.expiry.Stop()
	return c, nil
}

// put gives a connection back to the pool for the next mail. It closes the connection instead if it
// is broken or has sent MaxMessagesPerConnection mails, or if the pool is closed.
func (p *pool) put(c *conn) {
	defer func() { <-p.slots }()
	switch {
	case c.broken:
		_ = c.raw.Close()
	case c.atLimit() || !p.keep(c):
		c.quit()
	}
}

func (p *pool) keep(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.idle = append(p.idle, c)
	if c.expiry == nil {
		c.expiry = time.AfterFunc(p.idleFor, func() { p.expire(c) })
	} else {
		c.expiry.Reset(p.idleFor)
	}
	return true
}

// expire closes a connection whose idle timeout has passed. The connection's timer calls it.
func (p *pool) expire(c *conn) {
	p.mu.Lock()
	at := slices.Index(p.idle, c)
	if at < 0 { // the connection was taken or closed after the timer had fired
		p.mu.Unlock()
		return
	}
	p.idle = slices.Delete(p.idle, at, at+1)
	p.closing.Add(1)
	p.mu.Unlock()
	defer p.closing.Done()
	c.quit()
}

// close closes the idle connections and waits until they are closed. Connections in use are closed
// when put takes them back.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	idle := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, c := range idle {
		c.expiry.Stop()
		p.closing.Go(c.quit)
	}
	p.closing.Wait()
}
