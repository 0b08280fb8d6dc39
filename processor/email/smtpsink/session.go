package smtpsink

import (
	"bytes"
	"crypto/hmac"
	"crypto/md5" //nolint:gosec // CRAM-MD5 is defined on it
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net/mail"
	"slices"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"
)

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
