package redisx

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// Access has the settings of a connection beside the URL: the Redis user, and how Redis and this
// process prove to each other who they are. The files are read for each new connection, so that a
// password or a certificate can be replaced while the process runs.
type Access struct {
	Username     string // instead of a user in the URL
	Password     string // instead of a password in the URL
	PasswordFile string // file with the password, instead of Password

	CAFile            string // PEM file with the authorities to trust; "": those of the system
	CertFile, KeyFile string // PEM files with the certificate of this process, if Redis wants one
	ServerName        string // name in the certificate of Redis; "": the host of each address
	// TLS is the caller's own TLS configuration; nil: the default one. The other fields change a
	// copy of it. The minimum version is raised to TLS 1.2.
	TLS *tls.Config
}

// Check returns an error for each setting that contradicts the URL or another setting, that leaves
// the certificate of Redis unverified, or whose file can't be used. Each error begins with the
// setting's environment variable, without the prefix BULKACTION_REDIS_; for the field TLS with
// "TLS". It reads the files only if it finds no error without them.
func (a Access) Check(o Options) error {
	var errs []error
	mistake := func(wrong bool, name, problem string) {
		if wrong {
			errs = append(errs, errors.New(name+": "+problem))
		}
	}
	const twice = "the URL has a user or a password, too: set only one of both"
	inURL := o.Username != "" || o.password != ""
	mistake(inURL && a.Username != "", "USERNAME", twice)
	mistake(inURL && a.Password != "", "PASSWORD", twice)
	mistake(inURL && a.PasswordFile != "", "PASSWORD_FILE", twice)
	mistake(a.Password != "" && a.PasswordFile != "", "PASSWORD", "set either it or PASSWORD_FILE, not both")
	mistake(a.Username != "" && a.Password == "" && a.PasswordFile == "", "USERNAME", "needs PASSWORD or PASSWORD_FILE")
	if !o.TLS {
		const plain = "needs a URL that begins with rediss:// or rediss-sentinel://"
		mistake(a.CAFile != "", "TLS_CA_FILE", plain)
		mistake(a.CertFile != "", "TLS_CERT_FILE", plain)
		mistake(a.KeyFile != "", "TLS_KEY_FILE", plain)
		mistake(a.ServerName != "", "TLS_SERVER_NAME", plain)
		mistake(a.TLS != nil, "TLS", plain)
	}
	mistake((a.CertFile == "") != (a.KeyFile == ""),
		"TLS_CERT_FILE", "must be set together with TLS_KEY_FILE, or not at all")
	mistake(a.TLS != nil && a.TLS.InsecureSkipVerify && a.TLS.VerifyConnection == nil &&
		a.TLS.VerifyPeerCertificate == nil,
		"TLS", "InsecureSkipVerify without its own verification is refused: set RootCAs")
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if _, err := a.password(); err != nil {
		errs = append(errs, err)
	}
	if _, err := a.tlsConfig(""); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// password returns Password, or the content of PasswordFile without the line breaks at its end. An
// empty file is an error.
func (a Access) password() (string, error) {
	if a.PasswordFile == "" {
		return a.Password, nil
	}
	content, err := os.ReadFile(a.PasswordFile)
	if err != nil {
		return "", fmt.Errorf("PASSWORD_FILE: %w", err)
	}
	password := strings.TrimRight(string(content), "\r\n")
	if password == "" {
		return "", fmt.Errorf("PASSWORD_FILE: %s is empty", a.PasswordFile)
	}
	return password, nil
}

// credentials returns the function by which go-redis asks for user and password at each new
// connection; nil if neither Password nor PasswordFile is set.
func (a Access) credentials() func(context.Context) (username, password string, err error) {
	if a.Password == "" && a.PasswordFile == "" {
		return nil
	}
	return func(context.Context) (string, string, error) {
		password, err := a.password()
		if err != nil {
			return "", "", &net.OpError{Op: "dial", Net: "tcp", Err: err} // callers may repeat the command
		}
		return a.Username, password, nil
	}
}

// tlsConfig returns the TLS configuration of a connection to addr.
func (a Access) tlsConfig(addr string) (*tls.Config, error) {
	config := a.TLS.Clone()
	if config == nil {
		config = &tls.Config{}
	}
	config.MinVersion = max(config.MinVersion, tls.VersionTLS12)
	if a.ServerName != "" {
		config.ServerName = a.ServerName
	}
	if config.ServerName == "" {
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	if a.CAFile != "" {
		pem, err := os.ReadFile(a.CAFile)
		if err != nil {
			return nil, fmt.Errorf("TLS_CA_FILE: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("TLS_CA_FILE: %s has no certificate in PEM", a.CAFile)
		}
	}
	if a.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(a.CertFile, a.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("TLS_CERT_FILE: read the certificate and its key: %w", err)
		}
		config.Certificates = []tls.Certificate{cert}
	}
	return config, nil
}

// dialTLS opens a TLS connection to Redis or to a Sentinel. Its errors are network errors, so that
// a running process repeats its commands until a certificate is replaced.
func (a Access) dialTLS(ctx context.Context, network, addr string) (net.Conn, error) {
	failed := func(err error) error { return &net.OpError{Op: "dial", Net: network, Err: err} }
	config, err := a.tlsConfig(addr)
	if err != nil {
		return nil, failed(err)
	}
	raw, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = raw.Close() // nothing was sent
		if ctx.Err() != nil {
			return nil, err
		}
		return nil, failed(fmt.Errorf("TLS with %s: %w", addr, adviseTLS(err)))
	}
	return conn, nil
}

// refusalError is the error of a connection that the server or this process refused because of TLS,
// or of which only one side speaks TLS. To repeat the connection is no help: a setting or a
// certificate must be changed. advice says which.
type refusalError struct {
	error
	advice string
}

func (e *refusalError) Error() string { return e.error.Error() + ": " + e.advice }
func (e *refusalError) Unwrap() error { return e.error }

const noTLSAdvice = "this port does not speak TLS: give the port of tls-port, or write redis:// instead of rediss://"

// adviseTLS adds to an error of a TLS connection what to do about it, as a refusalError. It returns
// all errors that it does not recognize unchanged.
func adviseTLS(err error) error {
	if _, advised := errors.AsType[*refusalError](err); err == nil || advised {
		return err
	}
	advice := ""
	_, unknownAuthority := errors.AsType[x509.UnknownAuthorityError](err)
	_, wrongName := errors.AsType[x509.HostnameError](err)
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	_, noTLS := errors.AsType[tls.RecordHeaderError](err)
	says := func(text string) bool { return strings.Contains(err.Error(), text) } // alerts have no exported type
	switch {
	case unknownAuthority:
		advice = "set REDIS_TLS_CA_FILE to a file with the authority that signed the certificate of Redis"
	case wrongName:
		advice = "connect to a name that the certificate of Redis has, or set REDIS_TLS_SERVER_NAME to it"
	case isInvalid && invalid.Reason == x509.Expired:
		advice = "give Redis a certificate that is valid now, and check the clocks"
	case isInvalid:
		advice = "give Redis a certificate for servers, signed by an authority in REDIS_TLS_CA_FILE"
	case noTLS:
		advice = noTLSAdvice
	case says("tls: protocol version not supported"), says("tls: server selected unsupported protocol version"):
		advice = "Redis must offer TLS 1.2 or 1.3: see tls-protocols in its configuration"
	case says("remote error: tls: "): // an alert of Redis
		advice = "Redis wants a certificate that it trusts: set REDIS_TLS_CERT_FILE and REDIS_TLS_KEY_FILE, " +
			"or tls-auth-clients no in the configuration of Redis"
	default:
		return err
	}
	return &refusalError{err, advice}
}

// explain replaces the error of the first command on a new Conn by one that gives the reason, if
// the URL or a certificate is the reason: Redis then often only closes the connection, or waits for
// more bytes. To find out, it connects to the first address of o, and sends no secret.
func (a Access) explain(ctx context.Context, o Options, err error) error {
	if _, refused := errors.AsType[*refusalError](err); refused || !call.IsUnavailable(err) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, MaxBlock)
	defer cancel()
	addr := o.Addrs[0]
	switch {
	case !o.TLS && speaksTLS(ctx, addr):
		return &refusalError{err, "this port speaks TLS: write rediss:// instead of redis://"}
	case o.TLS && speaksPlain(ctx, addr):
		return &refusalError{err, noTLSAdvice}
	case o.TLS:
		if refused, ok := errors.AsType[*refusalError](a.refusal(ctx, addr)); ok {
			return refused
		}
	}
	return err
}

// speaksTLS reports whether a server answers a TLS handshake with a certificate. It verifies the
// certificate for a name that no server has, so the handshake fails. It sends no command.
func speaksTLS(ctx context.Context, addr string) bool {
	dialer := tls.Dialer{Config: &tls.Config{ServerName: "probe.invalid", MinVersion: tls.VersionTLS12}}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err == nil {
		_ = conn.Close() // nothing was sent
		return true
	}
	_, certificate := errors.AsType[*tls.CertificateVerificationError](err)
	return certificate
}

// speaksPlain reports whether a server answers a PING without TLS.
func speaksPlain(ctx context.Context, addr string) bool {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return false
	}
	defer conn.Close()
	reply := make([]byte, 1)
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline) // an error shows in Read
	}
	_, _ = conn.Write([]byte("PING\r\n")) // an error shows in Read
	_, err = conn.Read(reply)
	return err == nil && (reply[0] == '+' || reply[0] == '-')
}

// refusal opens a TLS connection to addr, sends no command, and returns the error with which Redis
// refuses the certificate of this process. If Redis accepts it, refusal waits until the deadline of
// ctx and returns a timeout. With TLS 1.3 Redis reports the refusal only after the client's
// handshake, and a command sent before that could destroy the report.
func (a Access) refusal(ctx context.Context, addr string) error {
	conn, err := a.dialTLS(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline) // an error shows in Read
	}
	_, err = conn.Read(make([]byte, 1))
	return adviseTLS(err)
}
