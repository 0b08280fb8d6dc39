package redisx

import (
	"context"
	"crypto/tls"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// secured returns a Config that connects to url with a client certificate of the authority ca.
func secured(url string, ca *redistest.Authority) Config {
	own := ca.Issue()
	return Config{
		URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience,
		Access: Access{CAFile: ca.CAFile, CertFile: own.CertFile, KeyFile: own.KeyFile},
	}
}

func connectTo(t *testing.T, cfg Config) *Conn {
	t.Helper()
	c, err := Connect(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestTLSToASingleServer(t *testing.T) {
	t.Parallel()
	ca := redistest.NewAuthority(t)
	s := redistest.Server(t, redistest.TLS(ca), redistest.Args("--requirepass", "sesame"))
	cfg := secured("rediss://:sesame@"+s.TLSAddr()+"/2", ca)
	c := connectTo(t, cfg)
	require.Equal(t, "single at "+s.TLSAddr()+" db 2 over TLS", c.String())
	require.NoError(t, c.Cmd.Set(t.Context(), "k", "v", 0).Err())
	require.ErrorIs(t, c.Block.BLPop(t.Context(), 10*time.Millisecond, "none").Err(), redis.Nil)

	// A program may bring its own configuration.
	pair, err := tls.LoadX509KeyPair(cfg.CertFile, cfg.KeyFile)
	require.NoError(t, err)
	cfg.Access = Access{TLS: &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}}}
	require.Equal(t, "v", connectTo(t, cfg).Cmd.Get(t.Context(), "k").Val())
}

func TestTLSToACluster(t *testing.T) {
	t.Parallel()
	ca := redistest.NewAuthority(t)
	url, nodes := redistest.Cluster(t, 3, redistest.TLS(ca))
	for _, url := range []string{url, "rediss://" + nodes[2].TLSAddr() + "?cluster=true"} {
		c := connectTo(t, secured(url, ca))
		require.True(t, c.IsCluster())
		require.NoError(t, c.Ping(t.Context()))
		for _, key := range []string{"a", "b", "c", "d", "e", "f"} { // on all masters
			require.NoError(t, c.Cmd.Set(t.Context(), key, "v", 0).Err())
		}
		for _, node := range nodes {
			require.Positive(t, node.Client().DBSize(t.Context()).Val())
		}
	}
}

func TestTLSToSentinels(t *testing.T) {
	t.Parallel()
	ca := redistest.NewAuthority(t)
	s := redistest.Sentinel(t, redistest.TLS(ca))
	c := connectTo(t, secured(s.URL, ca))
	require.NoError(t, c.Cmd.Set(t.Context(), "k", "v", 0).Err())
	require.EqualValues(t, 1, c.Cmd.Do(t.Context(), "wait", 1, 10_000).Val())
	s.Master.Kill()
	s.AwaitFailover()
	require.Eventually(t, func() bool { return c.Cmd.Get(t.Context(), "k").Val() == "v" }, patience, glance)
}

// TestTLSRefusals: for each mistake in the table, with certificates, protocols or ports, Connect
// returns an error that says what to do.
func TestTLSRefusals(t *testing.T) {
	t.Parallel()
	ca, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	good := redistest.Server(t, redistest.TLS(ca))
	open := redistest.Server(t, redistest.TLS(ca), redistest.Args("--tls-auth-clients", "no"))
	url := func(s *redistest.Redis) string { return "rediss://" + s.TLSAddr() }
	anonymous := func(s *redistest.Redis) Config {
		return Config{URL: url(s), CommandTimeout: patience, Access: Access{CAFile: ca.CAFile}}
	}
	for name, test := range map[string]struct {
		config Config
		says   string
	}{
		"unknown authority": {
			Config{URL: url(open), Access: Access{CAFile: other.CAFile}},
			"set REDIS_TLS_CA_FILE to a file with the authority that signed the certificate of Redis",
		},
		"authority of the system": {
			Config{URL: url(open)}, "certificate signed by unknown authority: set REDIS_TLS_CA_FILE",
		},
		"expired": {
			anonymous(redistest.Server(t, redistest.TLS(ca, redistest.Expired), redistest.Args("--tls-auth-clients", "no"))),
			"expired or is not yet valid: current time",
		},
		"wrong name": {
			anonymous(redistest.Server(t, redistest.TLS(ca, redistest.ForName("redis.example")), redistest.Args("--tls-auth-clients", "no"))),
			"set REDIS_TLS_SERVER_NAME to it",
		},
		"TLS 1.1 only": {
			anonymous(redistest.Server(t, redistest.TLS(ca), redistest.Args("--tls-auth-clients", "no",
				"--tls-protocols", "TLSv1.1", "--tls-ciphers", "DEFAULT@SECLEVEL=0"))),
			"Redis must offer TLS 1.2 or 1.3",
		},
		"no certificate of the client": {anonymous(good), "set REDIS_TLS_CERT_FILE and REDIS_TLS_KEY_FILE"},
		"certificate of a stranger": {
			func() Config { c := secured(url(good), other); c.CAFile = ca.CAFile; return c }(),
			"Redis wants a certificate that it trusts",
		},
		"plain text to the port of TLS": {
			Config{URL: "redis://" + good.TLSAddr()}, "this port speaks TLS: write rediss:// instead of redis://",
		},
		"TLS to the port of plain text": {
			Config{URL: "rediss://" + good.Addr(), DialTimeout: 100 * time.Millisecond}, "this port does not speak TLS: give the port of tls-port",
		},
		"one TLS Sentinel": {
			Config{URL: "redis-sentinel://" + good.TLSAddr() + "/main"}, "this port speaks TLS",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Connect(t.Context(), test.config)
			require.ErrorContains(t, err, "connect to redis, ")
			require.ErrorContains(t, err, test.says)
		})
	}
	t.Run("the controls", func(t *testing.T) {
		t.Parallel()
		require.NoError(t, connectTo(t, anonymous(open)).Ping(t.Context()))
		named := redistest.Server(t, redistest.TLS(ca, redistest.ForName("redis.example")), redistest.Args("--tls-auth-clients", "no"))
		cfg := anonymous(named)
		cfg.ServerName = "redis.example"
		require.NoError(t, connectTo(t, cfg).Ping(t.Context()))
	})
}

// TestRefusedCertificateIsAnOutage: after the CA file of a running process was overwritten, it no
// longer trusts Redis: IsUnavailable is true for the error of Ping. When the file has the right
// authority again, Ping succeeds.
func TestRefusedCertificateIsAnOutage(t *testing.T) {
	t.Parallel()
	ca, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	s := redistest.Server(t, redistest.TLS(ca), redistest.Args("--tls-auth-clients", "no"))
	trusted := filepath.Join(t.TempDir(), "ca.pem")
	use := func(a *redistest.Authority) {
		text, err := os.ReadFile(a.CAFile)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(trusted, text, 0o600))
	}
	use(ca)
	c := connectTo(t, Config{URL: "rediss://" + s.TLSAddr(), CommandTimeout: patience, Access: Access{CAFile: trusted}})
	use(other)
	s.Kill()
	s.Restart() // ends the open connections
	var err error
	require.Eventually(t, func() bool { // the first calls find their connections closed
		err = c.Ping(t.Context())
		return err != nil && call.NeverSent(err)
	}, patience, glance)
	require.True(t, call.IsUnavailable(err))
	require.ErrorContains(t, err, "set REDIS_TLS_CA_FILE")
	use(ca)
	require.Eventually(t, func() bool { return c.Ping(t.Context()) == nil }, patience, glance)
}

// TestPasswordFileIsReadAgain: a new password in the password file is used for the next connection,
// without a restart of the process.
func TestPasswordFileIsReadAgain(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Server(t)
	require.NoError(t, s.Client().Do(ctx, "acl", "setuser", "worker", "on", ">first", "~*", "+@all").Err())
	require.NoError(t, s.Client().Do(ctx, "acl", "setuser", "default", "nopass", "off").Err())
	admin := connect(t, "redis://worker:first@"+s.Addr()).Cmd

	file := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(file, []byte("first\r\n"), 0o600))
	cfg := Config{URL: "redis://" + s.Addr(), CommandTimeout: patience, Access: Access{Username: "worker", PasswordFile: file}}
	c := connectTo(t, cfg)
	require.Equal(t, "worker", c.Cmd.Do(ctx, "acl", "whoami").Val())

	require.NoError(t, admin.Do(ctx, "acl", "setuser", "worker", ">second", "<first").Err())
	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	require.NoError(t, admin.Do(ctx, "client", "kill", "user", "worker", "skipme", "yes").Err())
	require.Eventually(t, func() bool { return c.Ping(ctx) == nil }, patience, glance)

	require.NoError(t, os.Remove(file))
	require.NoError(t, admin.Do(ctx, "client", "kill", "user", "worker", "skipme", "yes").Err())
	var err error
	require.Eventually(t, func() bool { err = c.Ping(ctx); return err != nil && call.NeverSent(err) }, patience, glance)
	require.ErrorContains(t, err, "PASSWORD_FILE: open "+file)
	_, err = Connect(ctx, cfg)
	require.ErrorContains(t, err, "PASSWORD_FILE: open "+file)
}

func TestAccessMistakes(t *testing.T) {
	t.Parallel()
	ca := redistest.NewAuthority(t)
	own := ca.Issue()
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, []byte("\n"), 0o600))
	for name, test := range map[string]struct {
		url    string
		access Access
		want   string
	}{
		"two users":           {"redis://u:p@h", Access{Username: "v", Password: "q"}, "USERNAME: the URL has a user or a password, too: set only one of both\nPASSWORD: the URL has a user or a password, too: set only one of both"},
		"two passwords":       {"redis://:p@h", Access{PasswordFile: "x"}, "PASSWORD_FILE: the URL has"},
		"password twice":      {"redis://h", Access{Password: "p", PasswordFile: "x"}, "PASSWORD: set either it or PASSWORD_FILE, not both"},
		"user alone":          {"redis://h", Access{Username: "u"}, "USERNAME: needs PASSWORD or PASSWORD_FILE"},
		"absent password":     {"redis://h", Access{PasswordFile: "nosuch"}, "PASSWORD_FILE: open nosuch"},
		"empty password":      {"redis://h", Access{PasswordFile: empty}, "is empty"},
		"no TLS":              {"redis://h", Access{CAFile: "x", CertFile: "x", KeyFile: "x", ServerName: "x", TLS: &tls.Config{}}, "TLS_CA_FILE: needs a URL that begins with rediss:// or rediss-sentinel://\nTLS_CERT_FILE: needs"},
		"no key":              {"rediss://h", Access{CertFile: own.CertFile}, "TLS_CERT_FILE: must be set together with TLS_KEY_FILE, or not at all"},
		"no verification":     {"rediss://h", Access{TLS: &tls.Config{InsecureSkipVerify: true}}, "TLS: InsecureSkipVerify without its own verification is refused"},
		"absent authority":    {"rediss://h", Access{CAFile: "nosuch"}, "TLS_CA_FILE: open nosuch"},
		"no authority":        {"rediss://h", Access{CAFile: own.KeyFile}, "has no certificate in PEM"},
		"key of another cert": {"rediss://h", Access{CertFile: own.CertFile, KeyFile: ca.Issue().KeyFile}, "TLS_CERT_FILE: read the certificate and its key"},
		"fine":                {"rediss-sentinel://h/m?sentinel_password=p", Access{Password: "p", CAFile: ca.CAFile, CertFile: own.CertFile, KeyFile: own.KeyFile}, ""},
	} {
		o, err := ParseURL(test.url)
		require.NoError(t, err, name)
		err = test.access.Check(o)
		if test.want == "" {
			require.NoError(t, err, name)
			continue
		}
		require.ErrorContains(t, err, test.want, name)
	}
}
