package email_test

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/textproto"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

func TestConnectionRefused(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := config(t, listener.Addr().String())
	require.NoError(t, listener.Close())

	p := start(t, c)
	for range 2 * c.MaxConnections { // a failed connection attempt gives its slot back
		_, err = p.Process(t.Context(), job(1, toBob))
		v := processor.Classify(err)
		require.Equal(t, processor.RetryLater, v.Kind)
		require.Equal(t, email.CodeUnreachable, v.Code)
	}
}

// serve runs a scripted mail server and returns its address. It calls script for each connection;
// the first connection has number 1.
func serve(t *testing.T, script func(c *textproto.Conn, number int)) (addr string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for number := 1; ; number++ {
			socket, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				c := textproto.NewConn(socket)
				script(c, number)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	return listener.Addr().String()
}

// answer is a step of the scripted server: it reads one SMTP command of the client, sends reply and
// returns the command.
func answer(c *textproto.Conn, reply string) string {
	command, err := c.ReadLine()
	if err != nil {
		return ""
	}
	_ = c.PrintfLine("%s", reply)
	return command
}

func greet(c *textproto.Conn) {
	_ = c.PrintfLine("220 hello")
	answer(c, "250 hello")
}

func takeMail(c *textproto.Conn) (ok bool) {
	for _, reply := range []string{"250 sender", "250 recipient", "354 go on"} {
		answer(c, reply)
	}
	_, err := c.ReadDotBytes()
	_ = c.PrintfLine("250 taken")
	return err == nil
}

func TestServerThatHungUpOnAnIdleConnection(t *testing.T) {
	for name, lastCommand := range map[string]func(*textproto.Conn){
		"closed":       func(*textproto.Conn) {},
		"421 on MAIL":  func(c *textproto.Conn) { answer(c, "421 too long idle") },
		"421 unasked":  func(c *textproto.Conn) { _ = c.PrintfLine("421 shutting down") },
		"reset midway": func(c *textproto.Conn) { _, _ = c.ReadLine() },
	} {
		t.Run(name, func(t *testing.T) {
			var taken, connections atomic.Int64
			left := make(chan struct{}, 2)
			addr := serve(t, func(c *textproto.Conn, number int) {
				connections.Add(1)
				greet(c)
				if takeMail(c) {
					taken.Add(1)
				}
				left <- struct{}{}
				if number == 1 {
					lastCommand(c)
					return
				}
				_, _ = c.ReadLine() // QUIT
			})
			p, err := email.New(config(t, addr))
			require.NoError(t, err)
			for i := range int64(2) {
				_, err := p.Process(t.Context(), job(i, toBob))
				require.NoError(t, err)
				<-left
			}
			require.EqualValues(t, 2, taken.Load())
			require.EqualValues(t, 2, connections.Load())
			require.NoError(t, p.Close())
		})
	}
}

// TestLostAnswerIsARetryAndSendsNothingTwice: the server closes the connection after the final dot
// of the second job's mail, without an answer. The client can't know whether the server took the
// mail: the job is to be retried, and the processor itself does not send the mail again.
func TestLostAnswerIsARetryAndSendsNothingTwice(t *testing.T) {
	var bodies atomic.Int64
	addr := serve(t, func(c *textproto.Conn, number int) {
		greet(c)
		if number == 1 && !takeMail(c) {
			return
		}
		for _, reply := range []string{"250 sender", "250 recipient", "354 go on"} {
			answer(c, reply)
		}
		if _, err := c.ReadDotBytes(); err == nil {
			bodies.Add(1)
		}
	})
	p := start(t, config(t, addr))
	_, err := p.Process(t.Context(), job(1, toBob))
	require.NoError(t, err)
	_, err = p.Process(t.Context(), job(2, toBob)) // on the same connection
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, email.CodeUnreachable, v.Code)
	require.EqualValues(t, 1, bodies.Load())
}

func TestRepliesThatEndTheConnection(t *testing.T) {
	tests := map[string]struct {
		script func(*textproto.Conn)
		kind   processor.Kind
		code   string
	}{
		"554 greeting": {func(c *textproto.Conn) { _ = c.PrintfLine("554 not you") }, processor.RetryLater, "SMTP_554"},
		"421 greeting": {func(c *textproto.Conn) { _ = c.PrintfLine("421 too busy") }, processor.RetryLater, "SMTP_421"},
		"421 on a new connection": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "421 too busy")
		}, processor.RetryLater, "SMTP_421"},
		"nonsense": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "hello?")
		}, processor.RetryLater, email.CodeUnreachable},
		"RSET refused": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "250 sender")
			answer(c, "550 unknown")
			answer(c, "502 what is RSET?")
		}, processor.Fail, "SMTP_550"},
		"DATA refused": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "250 sender")
			answer(c, "250 recipient")
			answer(c, "451 not now")
		}, processor.RetryLater, "SMTP_451"},
		"mail refused": {func(c *textproto.Conn) {
			greet(c)
			for _, reply := range []string{"250 sender", "250 recipient", "354 go on"} {
				answer(c, reply)
			}
			_, _ = c.ReadDotBytes()
			_ = c.PrintfLine("554 this is spam")
		}, processor.Fail, "SMTP_554"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, func(c *textproto.Conn, _ int) { tt.script(c) })
			_, err := start(t, config(t, addr)).Process(t.Context(), job(1, toBob))
			v := processor.Classify(err)
			require.Equal(t, tt.kind, v.Kind, "%v", err)
			require.Equal(t, tt.code, v.Code)
		})
	}
}

func TestHangEndsWithTheContext(t *testing.T) {
	for name, steps := range map[string]int{"no greeting": 0, "no answer to EHLO": 1, "no answer to MAIL": 2, "no answer to RCPT": 3} {
		t.Run(name, func(t *testing.T) {
			hanging := make(chan struct{})
			addr := serve(t, func(c *textproto.Conn, _ int) {
				replies := []string{"250 hello", "250 sender", "250 recipient"}
				if steps > 0 {
					_ = c.PrintfLine("220 hello")
				}
				for _, reply := range replies[:max(steps-1, 0)] {
					answer(c, reply)
				}
				close(hanging)
				for { // until the client closes the connection
					if _, err := c.ReadLine(); err != nil {
						return
					}
				}
			})
			p := start(t, config(t, addr))
			ctx, cancel := context.WithCancelCause(t.Context())
			go func() {
				<-hanging
				cancel(nil)
			}()
			_, err := p.Process(ctx, job(1, toBob))
			require.ErrorIs(t, err, context.Canceled)
		})
	}
}

func TestHangPastTheDeadlineIsATimeout(t *testing.T) {
	addr := serve(t, func(c *textproto.Conn, _ int) {
		greet(c)
		for {
			if _, err := c.ReadLine(); err != nil {
				return
			}
		}
	})
	p := start(t, config(t, addr))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := p.Process(ctx, job(1, toBob))
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, processor.CodeTimeout, v.Code)
}

func TestHangPastItsOwnTimeoutIsARetry(t *testing.T) {
	addr := serve(t, func(c *textproto.Conn, _ int) { _, _ = c.ReadLine() })
	c := config(t, addr)
	c.Timeout = 50 * time.Millisecond
	_, err := start(t, c).Process(t.Context(), job(1, toBob))
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, email.CodeUnreachable, v.Code)
}

func TestIdleConnectionEndsWithQUIT(t *testing.T) {
	lastCommand := make(chan string, 1)
	addr := serve(t, func(c *textproto.Conn, _ int) {
		greet(c)
		takeMail(c)
		lastCommand <- answer(c, "221 bye")
	})
	c := config(t, addr)
	c.IdleTimeout = time.Millisecond
	_, err := start(t, c).Process(t.Context(), job(1, toBob))
	require.NoError(t, err)
	require.Equal(t, "QUIT", <-lastCommand)
}

func TestHELO(t *testing.T) {
	said := make(chan string, 1)
	addr := serve(t, func(c *textproto.Conn, _ int) {
		_ = c.PrintfLine("220 hello")
		said <- answer(c, "554 no")
	})
	c := config(t, addr)
	c.HELO = "mail.example.com"
	_, err := start(t, c).Process(t.Context(), job(1, toBob))
	require.Error(t, err)
	require.True(t, strings.HasSuffix(<-said, " mail.example.com"))
}

// certificate returns a self-signed certificate for 127.0.0.1 and the name of its PEM file.
func certificate(t *testing.T) (tls.Certificate, string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}

func TestTLSModes(t *testing.T) {
	cert, ca := certificate(t)
	_, otherCA := certificate(t)
	tests := map[string]struct {
		mode, ca           string
		offered, implicit  bool
		encrypted, refused bool
	}{
		"none":                                {mode: email.TLSNone, ca: ca, offered: true},
		"opportunistic, offered":              {mode: email.TLSOpportunistic, ca: ca, offered: true, encrypted: true},
		"opportunistic, not offered":          {mode: email.TLSOpportunistic, ca: ca},
		"opportunistic, unknown authority":    {mode: email.TLSOpportunistic, ca: otherCA, offered: true, refused: true},
		"mandatory, offered":                  {mode: email.TLSMandatory, ca: ca, offered: true, encrypted: true},
		"mandatory, not offered":              {mode: email.TLSMandatory, ca: ca, refused: true},
		"mandatory, authorities of system":    {mode: email.TLSMandatory, offered: true, refused: true},
		"implicit":                            {mode: email.TLSImplicit, ca: ca, offered: true, implicit: true, encrypted: true},
		"implicit, unknown authority":         {mode: email.TLSImplicit, ca: otherCA, offered: true, implicit: true, refused: true},
		"implicit, server speaks plain first": {mode: email.TLSImplicit, ca: ca, refused: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var encrypted atomic.Int64
			opts := smtpsink.Options{ImplicitTLS: tt.implicit}
			if tt.offered {
				opts.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, VerifyConnection: func(tls.ConnectionState) error {
					encrypted.Add(1)
					return nil
				}}
			}
			sink := startSink(t, opts)
			c := config(t, sink.Addr())
			c.TLS, c.TLSCAFile = tt.mode, tt.ca
			_, err := start(t, c).Process(t.Context(), job(1, toBob))
			if tt.refused {
				v := processor.Classify(err)
				require.Equal(t, processor.RetryLater, v.Kind)
				require.Equal(t, email.CodeUnreachable, v.Code)
				require.Zero(t, sink.Received())
				return
			}
			require.NoError(t, err)
			require.EqualValues(t, 1, sink.Received())
			require.Equal(t, tt.encrypted, encrypted.Load() == 1)
		})
	}
}

func TestAuthentication(t *testing.T) {
	cert, ca := certificate(t)
	all := []string(nil)
	tests := map[string]struct {
		auth, tls, password string
		offered             []string
		code                string // error code of the retry, if authentication fails
	}{
		"plain":                   {auth: email.AuthPlain, tls: email.TLSMandatory, offered: all},
		"plain on this host":      {auth: email.AuthPlain, tls: email.TLSNone, offered: all},
		"login":                   {auth: email.AuthLogin, tls: email.TLSImplicit, offered: all},
		"cram-md5":                {auth: email.AuthCRAMMD5, tls: email.TLSNone, offered: all},
		"auto":                    {auth: email.AuthAuto, tls: email.TLSMandatory, offered: all},
		"auto, plain only":        {auth: email.AuthAuto, tls: email.TLSImplicit, offered: []string{"PLAIN"}},
		"auto, login only":        {auth: email.AuthAuto, tls: email.TLSOpportunistic, offered: []string{"LOGIN"}},
		"wrong password":          {auth: email.AuthPlain, tls: email.TLSMandatory, password: "wrong", code: "SMTP_535"},
		"wrong password, digest":  {auth: email.AuthCRAMMD5, tls: email.TLSNone, password: "wrong", code: "SMTP_535"},
		"not offered":             {auth: email.AuthLogin, tls: email.TLSMandatory, offered: []string{"PLAIN"}, code: email.CodeUnreachable},
		"none where it is needed": {auth: email.AuthNone, tls: email.TLSNone, code: "SMTP_502"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			sink := startSink(t, smtpsink.Options{
				TLS: &tls.Config{Certificates: []tls.Certificate{cert}}, ImplicitTLS: tt.tls == email.TLSImplicit,
				Username: "shop", Password: "s3cret", Mechanisms: tt.offered,
			})
			c := config(t, sink.Addr())
			c.TLS, c.TLSCAFile, c.Auth, c.Username, c.Password = tt.tls, ca, tt.auth, "shop", cmp.Or(tt.password, "s3cret")
			_, err := start(t, c).Process(t.Context(), job(1, toBob))
			if tt.code == "" {
				require.NoError(t, err)
				require.EqualValues(t, 1, sink.Received())
				return
			}
			v := processor.Classify(err)
			require.Equal(t, tt.code, v.Code)
			require.NotContains(t, v.Message, "wrong")
			require.Zero(t, sink.Received())
			if tt.auth != email.AuthNone { // the server refused before MAIL, so the job did not cause it
				require.Equal(t, processor.RetryLater, v.Kind)
			}
		})
	}
}

// TestPasswordIsNotSentInTheClear: on an unencrypted connection to 127.0.0.2, which does not count
// as localhost, the job gets an error, with the settings auto, plain and login of Auth.
func TestPasswordIsNotSentInTheClear(t *testing.T) {
	sink, err := smtpsink.Start("127.0.0.2:0", smtpsink.Options{
		Username: "shop", Password: "s3cret", Mechanisms: []string{"PLAIN", "LOGIN"},
	})
	require.NoError(t, err)
	defer func() { require.NoError(t, sink.Close()) }()
	for _, auth := range []string{email.AuthAuto, email.AuthPlain, email.AuthLogin} {
		c := config(t, sink.Addr())
		c.TLS, c.Auth, c.Username, c.Password = email.TLSOpportunistic, auth, "shop", "s3cret"
		_, err = start(t, c).Process(t.Context(), job(1, toBob))
		require.ErrorContains(t, err, "unencrypted connection", auth)
	}
	require.Zero(t, sink.Received())
}
