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
	quitTimeout      = 2 * time.Second // the longest time for the QUIT command
	codeShuttingDown = 421             // the server closes the connection after this reply
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
		mail.WithUsername(config.Username), mail.WithPassword(password), tlsOptions[config.TLS],
	}}
	if config.HELO != "" {
		d.options = append(d.options, mail.WithHELO(config.HELO))
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
		return nil, err
	}
	return &conn{raw: raw, session: session, config: &d.config}, nil
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

// send sends one mail in as few round trips as SMTP allows without pipelining: it sends RSET only
// after a refusal, and it does not probe the connection first. stale is true if the connection
// turned out to be unusable before the server accepted the MAIL command; then sending the mail over
// another connection can't duplicate it.
func (c *conn) send(ctx context.Context, from string, m *message) (stale bool, err error) {
	cancel := closeAfter(ctx, c.raw)
	defer func() {
		if !cancel() {
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

// judge sets whether the connection is broken, and returns it. It is not broken if err is a 4xx or
// 5xx reply other than 421, after which the server closes the connection.
func (c *conn) judge(err error) (broken bool) {
	var reply *textproto.Error
	refused := errors.As(err, &reply) && reply.Code >= 400 && reply.Code < 600
	c.broken = !refused || reply.Code == codeShuttingDown
	return c.broken
}

// abort prepares the connection for the next mail after a command of this one has failed with err.
// It returns err.
func (c *conn) abort(err error) error {
	if !c.judge(err) && c.session.Reset() != nil {
		c.broken = true
	}
	return err
}

// atLimit returns true when the connection has sent MaxMessagesPerConnection mails.
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
