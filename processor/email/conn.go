package email

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/textproto"
	"slices"
	"strconv"
	"time"

	"github.com/wneessen/go-mail"
	"github.com/wneessen/go-mail/smtp"
)

const (
	goodbye          = 2 * time.Second // how long a QUIT may take
	codeShuttingDown = 421             // the server ends the connection with this reply
)

// autoAuth is what AuthAuto prefers, strongest first. go-mail refuses to send a password in the
// clear, except to this host.
var autoAuth = []mail.SMTPAuthType{
	mail.SMTPAuthSCRAMSHA256PLUS, mail.SMTPAuthSCRAMSHA256, mail.SMTPAuthSCRAMSHA1PLUS, mail.SMTPAuthSCRAMSHA1,
	mail.SMTPAuthCramMD5, mail.SMTPAuthPlain, mail.SMTPAuthLogin,
}

// dialer opens connections that are ready for the first mail.
type dialer struct {
	config  Config
	tls     *tls.Config
	options []mail.Option
}

func newDialer(config Config) (*dialer, error) {
	password, err := config.password()
	if err != nil {
		return nil, err
	}
	tlsConfig, err := config.tlsConfig()
	if err != nil {
		return nil, err
	}
	d := &dialer{config: config, tls: tlsConfig, options: []mail.Option{
		mail.WithPort(config.Port), mail.WithTimeout(config.Timeout), mail.WithTLSConfig(tlsConfig),
		mail.WithUsername(config.Username), mail.WithPassword(password),
	}}
	if config.HELO != "" {
		d.options = append(d.options, mail.WithHELO(config.HELO))
	}
	switch config.TLS {
	case TLSNone:
		d.options = append(d.options, mail.WithTLSPolicy(mail.NoTLS))
	case TLSOpportunistic:
		d.options = append(d.options, mail.WithTLSPolicy(mail.TLSOpportunistic))
	case TLSMandatory:
		d.options = append(d.options, mail.WithTLSPolicy(mail.TLSMandatory))
	case TLSImplicit:
		d.options = append(d.options, mail.WithSSL())
	}
	switch {
	case config.Username == "" || config.Auth == AuthNone:
	case config.Auth == AuthPlain:
		d.options = append(d.options, mail.WithSMTPAuth(mail.SMTPAuthPlain))
	case config.Auth == AuthLogin:
		d.options = append(d.options, mail.WithSMTPAuth(mail.SMTPAuthLogin))
	case config.Auth == AuthCRAMMD5:
		d.options = append(d.options, mail.WithSMTPAuth(mail.SMTPAuthCramMD5))
	case config.Auth == AuthAuto:
		d.options = append(d.options, mail.WithOpportunisticSMTPAuth(autoAuth...))
	}
	return d, nil
}

// dial connects, greets, encrypts and authenticates. go-mail heeds a context only while it
// connects, and leaves the socket open when a later step fails; so the socket is kept in sight, and
// closed for both.
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
	// One go-mail client a connection: it changes itself while it negotiates.
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
		return nil, err
	}
	return &conn{raw: raw, session: session, config: &d.config}, nil
}

// closeAfter closes the socket when ctx ends, which ends whatever waits for it. The function it
// returns calls that off, and answers false when it is too late.
func closeAfter(ctx context.Context, socket net.Conn) (callOff func() bool) {
	return context.AfterFunc(ctx, func() { _ = socket.Close() })
}

// conn is one connection with its SMTP session; one goroutine uses it at a time.
type conn struct {
	raw     net.Conn // beneath TLS
	session *smtp.Client
	config  *Config
	sent    int         // mails, whatever became of them
	broken  bool        // unfit for another mail
	expiry  *time.Timer // runs while idle; the pool's
}

var errNeedsUTF8 = errors.New("the mail server takes no address that is not ASCII")

// send hands one mail over in as few round trips as SMTP has without pipelining: a reset only after
// a refusal, no probe. stale tells that the connection failed before the server took the mail up.
func (c *conn) send(ctx context.Context, from string, m *message) (stale bool, err error) {
	callOff := closeAfter(ctx, c.raw)
	defer func() {
		if !callOff() {
			c.broken = true
		}
	}()
	c.sent++
	if m.utf8 {
		if offered, _ := c.session.Extension("SMTPUTF8"); !offered {
			return false, errNeedsUTF8
		}
	}
	c.session.SkipSMTPUTF8(!m.utf8)
	if err := c.session.UpdateDeadline(c.config.Timeout); err != nil {
		return c.judge(err), err
	}
	if err := c.session.Mail(from); err != nil {
		return c.judge(err), err
	}
	if err := c.session.Rcpt(m.to); err != nil {
		return false, c.abort(err)
	}
	body, err := c.session.Data()
	if err != nil {
		return false, c.abort(err)
	}
	if _, err := m.content.WriteTo(body); err != nil {
		c.broken = true
		return false, err
	}
	if err := body.Close(); err != nil {
		c.judge(err)
		return false, err
	}
	return false, nil
}

// judge marks the connection as broken unless err is the server's refusal of a mail.
func (c *conn) judge(err error) (broken bool) {
	var reply *textproto.Error
	refused := errors.As(err, &reply) && reply.Code >= 400 && reply.Code < 600
	c.broken = !refused || reply.Code == codeShuttingDown
	return c.broken
}

// abort makes the connection fit for the next mail after a refusal in the middle of a transaction.
func (c *conn) abort(err error) error {
	if !c.judge(err) && c.session.Reset() != nil {
		c.broken = true
	}
	return err
}

// worn tells that the connection has carried its share of mails.
func (c *conn) worn() bool {
	limit := c.config.MaxMessagesPerConnection
	return limit > 0 && c.sent >= limit
}

// quit takes leave as SMTP wants it, within a short time, and closes the connection.
func (c *conn) quit() {
	_ = c.raw.SetDeadline(time.Now().Add(goodbye))
	_ = c.session.Quit()
	_ = c.raw.Close()
}
