// Package smtpsink is a local SMTP server that accepts mail and delivers it nowhere, for demos,
// tests and benchmarks. It counts the accepted mails by recipient and by Message-ID, so that a mail
// that was sent twice is noticed. It hides the protocol, STARTTLS and authentication.
package smtpsink

import (
	"bytes"
	"crypto/hmac"
	"crypto/md5" //nolint:gosec // CRAM-MD5 is defined on it
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/mail"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"
)

const (
	defaultMaxTracked = 1 << 20
	maxMessageBytes   = 4 << 20 // enough for a payload of 256 KiB in quoted-printable
)

// Mail is one accepted mail.
type Mail struct {
	From, To string // envelope addresses; To is the first recipient
	Data     []byte // header and body with CRLF line ends; valid only during the call of OnMail
}

// Options changes what a sink does. With the zero value it accepts every well-formed mail of up to
// 4 MiB to addresses in ASCII, unencrypted.
type Options struct {
	// Reply decides about each recipient: 0 or 250 accepts it, 4xx and 5xx refuse it with that code
	// and text. Reply is called concurrently; the client waits until it returns.
	Reply func(recipient string) (code int, text string)
	// OnMail is called with each accepted mail, concurrently, before the client gets its answer.
	OnMail func(Mail)
	// MaxTracked is how many Message-IDs and how many recipients are counted one by one; 0 means
	// 1,048,576. A further recipient or Message-ID is not counted: its number stays 0, and
	// duplicates of it are not noticed.
	MaxTracked int
	// TLS offers STARTTLS. With ImplicitTLS, connections are encrypted from the first byte on.
	TLS         *tls.Config
	ImplicitTLS bool
	// Username makes clients authenticate before MAIL, by PLAIN, LOGIN or CRAM-MD5, encrypted or
	// not. If it is empty, clients need not authenticate.
	Username, Password string
	// Mechanisms restricts the offered authentication mechanisms; empty offers all three.
	Mechanisms []string
	// SMTPUTF8 accepts addresses that are not ASCII.
	SMTPUTF8 bool
}

// Sink is a running server.
type Sink struct {
	opts     Options
	server   *smtp.Server
	listener net.Listener
	serving  sync.WaitGroup
	serveErr error // error of the accept loop; read it only after serving has ended

	connections atomic.Int64
	received    atomic.Int64
	duplicates  atomic.Int64
	mu          sync.Mutex
	recipients  map[string]int
	messageIDs  map[string]int
}

// Start listens on addr, such as "127.0.0.1:0", and serves until Close.
func Start(addr string, opts Options) (*Sink, error) {
	if opts.ImplicitTLS && opts.TLS == nil {
		return nil, errors.New("start SMTP sink: ImplicitTLS needs TLS")
	}
	if opts.MaxTracked == 0 {
		opts.MaxTracked = defaultMaxTracked
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("start SMTP sink: %w", err)
	}
	s := &Sink{
		opts: opts, listener: listener,
		recipients: map[string]int{}, messageIDs: map[string]int{},
	}
	s.server = smtp.NewServer(smtp.BackendFunc(s.newSession))
	s.server.Domain = "smtpsink.invalid"
	s.server.MaxMessageBytes = maxMessageBytes
	s.server.AllowInsecureAuth = true
	s.server.EnableSMTPUTF8 = opts.SMTPUTF8
	s.server.ErrorLog = log.New(io.Discard, "", 0) // clients often close connections here; this is no error
	listener = &countingListener{listener, &s.connections}
	if opts.ImplicitTLS {
		listener = tls.NewListener(listener, opts.TLS)
	} else {
		s.server.TLSConfig = opts.TLS
	}
	s.serving.Go(func() { s.serveErr = s.server.Serve(listener) })
	return s, nil
}

// Addr returns the host and port on which the sink listens.
func (s *Sink) Addr() string { return s.listener.Addr().String() }

// Received returns the number of accepted mails.
func (s *Sink) Received() int64 { return s.received.Load() }

// Connections returns how many connections clients have opened so far.
func (s *Sink) Connections() int64 { return s.connections.Load() }

// Duplicates returns how many accepted mails had the Message-ID of an earlier mail.
func (s *Sink) Duplicates() int64 { return s.duplicates.Load() }

// ReceivedByRecipient returns the number of accepted mails whose first envelope recipient is
// address.
func (s *Sink) ReceivedByRecipient(address string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.recipients[address]
}

// ReceivedByMessageID returns the number of accepted mails with one Message-ID. id includes the
// angle brackets.
func (s *Sink) ReceivedByMessageID(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.messageIDs[id]
}

// Close stops listening, closes all connections and waits for the accept loop to end.
func (s *Sink) Close() error {
	err := s.server.Close()
	_ = s.listener.Close() // server.Close does not know the listener yet if the accept loop has not started
	s.serving.Wait()
	if err = errors.Join(err, s.serveErr); err != nil {
		return fmt.Errorf("close SMTP sink: %w", err)
	}
	return nil
}

func (s *Sink) accept(m Mail, messageID string) {
	s.mu.Lock()
	if messageID != "" {
		if s.messageIDs[messageID] > 0 {
			s.duplicates.Add(1)
		}
		s.track(s.messageIDs, messageID)
	}
	s.track(s.recipients, m.To)
	s.mu.Unlock()
	s.received.Add(1)
	if s.opts.OnMail != nil {
		s.opts.OnMail(m)
	}
}

func (s *Sink) track(counts map[string]int, key string) {
	if counts[key] > 0 || len(counts) < s.opts.MaxTracked {
		counts[key]++
	}
}

type countingListener struct {
	net.Listener
	n *atomic.Int64
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

// session is the server's side of one client's connection. go-smtp calls its methods from one
// goroutine at a time.
type session struct {
	sink     *Sink
	authed   bool
	from, to string
	data     bytes.Buffer
}

func (s *Sink) newSession(*smtp.Conn) (smtp.Session, error) {
	return &session{sink: s, authed: s.opts.Username == ""}, nil
}

func (s *session) Mail(from string, _ *smtp.MailOptions) error {
	if !s.authed {
		return smtp.ErrAuthRequired
	}
	s.from = from
	return nil
}

func (s *session) Rcpt(to string, _ *smtp.RcptOptions) error {
	if s.sink.opts.Reply != nil {
		if code, text := s.sink.opts.Reply(to); code != 0 && code != 250 {
			return &smtp.SMTPError{Code: code, Message: text}
		}
	}
	if s.to == "" {
		s.to = to
	}
	return nil
}

func (s *session) Data(r io.Reader) error {
	s.data.Reset()
	if _, err := s.data.ReadFrom(r); err != nil {
		return err
	}
	msg, err := mail.ReadMessage(bytes.NewReader(s.data.Bytes()))
	if err != nil {
		return &smtp.SMTPError{Code: 554, EnhancedCode: smtp.EnhancedCode{5, 6, 0}, Message: "Malformed message"}
	}
	s.sink.accept(Mail{From: s.from, To: s.to, Data: s.data.Bytes()}, msg.Header.Get("Message-ID"))
	return nil
}

func (s *session) Reset() { s.from, s.to = "", "" }

func (s *session) Logout() error { return nil }

func (s *session) AuthMechanisms() []string {
	switch {
	case s.sink.opts.Username == "":
		return nil
	case len(s.sink.opts.Mechanisms) > 0:
		return s.sink.opts.Mechanisms
	}
	return []string{"CRAM-MD5", "PLAIN", "LOGIN"}
}

func (s *session) Auth(mechanism string) (sasl.Server, error) {
	if !slices.Contains(s.AuthMechanisms(), mechanism) {
		return nil, smtp.ErrAuthUnknownMechanism
	}
	switch mechanism {
	case "PLAIN":
		return sasl.NewPlainServer(func(_, username, password string) error {
			return s.login(username == s.sink.opts.Username && password == s.sink.opts.Password)
		}), nil
	case "LOGIN":
		return &loginServer{session: s}, nil
	case "CRAM-MD5":
		return &cramMD5Server{session: s}, nil
	}
	return nil, smtp.ErrAuthUnknownMechanism
}

func (s *session) login(ok bool) error {
	if !ok {
		return smtp.ErrAuthFailed
	}
	s.authed = true
	return nil
}

// loginServer is the server's side of the authentication mechanism LOGIN: it asks for the user name
// and then for the password, as draft-murchison-sasl-login describes.
type loginServer struct {
	session  *session
	step     int
	username string
}

func (l *loginServer) Next(response []byte) (challenge []byte, done bool, err error) {
	l.step++
	switch l.step {
	case 1:
		return []byte("Username:"), false, nil
	case 2:
		l.username = string(response)
		return []byte("Password:"), false, nil
	}
	opts := &l.session.sink.opts
	return nil, true, l.session.login(l.username == opts.Username && string(response) == opts.Password)
}

// cramMD5Server is the server's side of CRAM-MD5 (RFC 2195): it sends a challenge, and checks the
// keyed digest of it that the client answers.
type cramMD5Server struct {
	session   *session
	challenge []byte
}

func (c *cramMD5Server) Next(response []byte) (challenge []byte, done bool, err error) {
	if c.challenge == nil {
		c.challenge = fmt.Appendf(nil, "<%s@smtpsink.invalid>", rand.Text())
		return c.challenge, false, nil
	}
	opts := &c.session.sink.opts
	mac := hmac.New(md5.New, []byte(opts.Password))
	mac.Write(c.challenge)
	want := opts.Username + " " + hex.EncodeToString(mac.Sum(nil))
	return nil, true, c.session.login(hmac.Equal(response, []byte(want)))
}
