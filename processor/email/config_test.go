package email_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/caarlos0/env/v10"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/email"
)

// limits are the limits of an account if no variable sets them.
var limits = credential.Limits{
	Rate: credential.Rate{Permits: 80, Window: 10 * time.Minute}, Limiter: credential.Sliding,
	Breaker: credential.Breaker{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3}, Concurrency: 1,
}

func parse(t *testing.T, vars map[string]string) email.Config {
	var c email.Config
	require.NoError(t, env.ParseWithOptions(&c, env.Options{Prefix: "SMTP_", Environment: vars}))
	return c
}

func TestConfigDefaults(t *testing.T) {
	c := parse(t, map[string]string{})
	require.NoError(t, c.Validate())
	require.Equal(t, email.Config{
		Host: "127.0.0.1", Port: 25, From: "bulkaction@localhost", TLS: email.TLSOpportunistic, Auth: email.AuthAuto,
		Timeout: 30 * time.Second, MaxConnections: 10, MaxMessagesPerConnection: 100, IdleTimeout: 30 * time.Second,
		Limits: limits,
	}, c)
}

func TestConfigFromTheEnvironment(t *testing.T) {
	c := parse(t, map[string]string{
		"SMTP_HOST": "mail.example.com", "SMTP_PORT": "465", "SMTP_USERNAME": "u", "SMTP_PASSWORD": "p",
		"SMTP_FROM": "Shop <shop@example.com>", "SMTP_TLS": "implicit", "SMTP_AUTH": "plain", "SMTP_TIMEOUT": "5s",
		"SMTP_MAX_CONNECTIONS": "3", "SMTP_MAX_MESSAGES_PER_CONNECTION": "0", "SMTP_IDLE_TIMEOUT": "1m", "SMTP_HELO": "here",
		"SMTP_ACCOUNTS_FILE": "accounts.yaml", "SMTP_ACCOUNT_CONCURRENCY": "3",
	})
	own := limits
	own.Concurrency = 3
	require.NoError(t, c.Validate())
	require.Equal(t, email.Config{
		Host: "mail.example.com", Port: 465, Username: "u", Password: "p", From: "Shop <shop@example.com>",
		TLS: email.TLSImplicit, Auth: email.AuthPlain, Timeout: 5 * time.Second,
		MaxConnections: 3, IdleTimeout: time.Minute, HELO: "here",
		AccountsFile: "accounts.yaml", Limits: own,
	}, c)
}

func TestValidateNamesEveryBadField(t *testing.T) {
	notPEM := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(notPEM, []byte("hello"), 0o600))
	bad := email.Config{
		Host: "a b", Port: 70000, Password: "hunter2", From: "nobody", TLS: "maybe",
		TLSCAFile: notPEM, Auth: "magic", Timeout: -1, MaxConnections: 0, MaxMessagesPerConnection: -1, HELO: "a\nb",
	}
	err := bad.Validate()
	for _, field := range []string{
		"HOST", "PORT", "USERNAME", "FROM", "TLS", "TLS_CA_FILE", "AUTH", "TIMEOUT",
		"IDLE_TIMEOUT", "MAX_CONNECTIONS", "MAX_MESSAGES_PER_CONNECTION", "HELO",
	} {
		require.ErrorContains(t, err, field+": ")
	}
	require.NotContains(t, err.Error(), "hunter2")
	_, err = email.New(bad)
	require.ErrorContains(t, err, "configure e-mail: ")
}

func TestValidateRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		vars map[string]string
		want string
	}{
		"no host":              {map[string]string{"SMTP_HOST": "unix:///run/smtp"}, "HOST"},
		"password in clear":    {map[string]string{"SMTP_HOST": "mail.example.com", "SMTP_TLS": "none", "SMTP_AUTH": "plain", "SMTP_USERNAME": "u"}, "AUTH"},
		"login without a name": {map[string]string{"SMTP_AUTH": "login"}, "USERNAME"},
		"sender not ASCII":     {map[string]string{"SMTP_FROM": "ö@example.com"}, "FROM"},
		"missing authorities":  {map[string]string{"SMTP_TLS_CA_FILE": "/nowhere/ca.pem"}, "TLS_CA_FILE"},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, parse(t, tt.vars).Validate(), tt.want+": ")
		})
	}
}
