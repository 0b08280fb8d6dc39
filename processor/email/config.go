package email

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/processor/credential"
)

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
