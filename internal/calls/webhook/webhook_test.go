package webhook_test

import (
	"encoding/base64"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
)

// The example of the specification Standard Webhooks.
const (
	vectorSecret    = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	vectorID        = "msg_p5jXN8AQM9LWM0D4loKWxJek"
	vectorTime      = 1614265330
	vectorBody      = `{"test": 2432232314}`
	vectorSignature = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
)

func keys(t *testing.T) *webhook.Keys {
	t.Helper()
	path := filepath.Join(t.TempDir(), "master")
	require.NoError(t, os.WriteFile(path, []byte("0123456789abcdef0123456789abcdef\n"), 0o600))
	k, err := webhook.ReadKeys(path)
	require.NoError(t, err)
	return k
}

func TestVector(t *testing.T) {
	t.Parallel()
	h := http.Header{}
	require.NoError(t, webhook.Sign(h, vectorID, time.Unix(vectorTime, 999), []byte(vectorBody), vectorSecret))
	require.Equal(t, http.Header{
		"Webhook-Id": {vectorID}, "Webhook-Timestamp": {"1614265330"}, "Webhook-Signature": {vectorSignature},
	}, h)
	require.NoError(t, webhook.Verify(vectorSecret, h, []byte(vectorBody), time.Unix(vectorTime, 0)))
}

// TestStandardWebhooks: what is signed here, the library of the specification verifies, and the other
// way round. With two signatures it verifies by each of the secrets.
func TestStandardWebhooks(t *testing.T) {
	t.Parallel()
	k := keys(t)
	body := []byte(`{"type":"group.completed","data":{"id":"g","name":"ä \u2028"}}`)
	old, now := k.Secret("acme", 1), k.Secret("acme", 2)
	h := http.Header{}
	require.NoError(t, webhook.Sign(h, "g.1.completed", time.Now(), body, now, old))
	require.Len(t, strings.Fields(h.Get(webhook.HeaderSignature)), 2)
	for _, secret := range []string{old, now} {
		library, err := standardwebhooks.NewWebhook(secret)
		require.NoError(t, err)
		require.NoError(t, library.Verify(body, h))
		require.NoError(t, webhook.Verify(secret, h, body, time.Now()))
		require.Error(t, library.Verify(append(body, '!'), h))

		at := time.Now()
		signature, err := library.Sign("g.2.failed", at, body)
		require.NoError(t, err)
		theirs := http.Header{}
		require.NoError(t, webhook.Sign(theirs, "g.2.failed", at, nil, secret)) // sets the other headers
		theirs.Set(webhook.HeaderSignature, "v1a,AAAA v1,AAAA "+signature)
		require.NoError(t, webhook.Verify(secret, theirs, body, at))
	}
	third := k.Secret("acme", 3)
	library, err := standardwebhooks.NewWebhook(third)
	require.NoError(t, err)
	require.Error(t, library.Verify(body, h))
	require.ErrorIs(t, webhook.Verify(third, h, body, time.Now()), webhook.ErrSignature)
}

// TestRefused changes one thing of a request that is verified.
func TestRefused(t *testing.T) {
	t.Parallel()
	now := time.Unix(vectorTime, 0)
	for name, change := range map[string]func(h http.Header, body *[]byte, now *time.Time){
		"id":              func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderID, "g.1.failed") },
		"no id":           func(h http.Header, _ *[]byte, _ *time.Time) { h.Del(webhook.HeaderID) },
		"time":            func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderTimestamp, "1614265331") },
		"no time":         func(h http.Header, _ *[]byte, _ *time.Time) { h.Del(webhook.HeaderTimestamp) },
		"garbage in time": func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderTimestamp, "yesterday") },
		"huge time":       func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderTimestamp, "9223372036854775807") },
		"too old":         func(_ http.Header, _ *[]byte, now *time.Time) { *now = now.Add(5*time.Minute + time.Second) },
		"too new":         func(_ http.Header, _ *[]byte, now *time.Time) { *now = now.Add(-5*time.Minute - time.Second) },
		"body":            func(_ http.Header, body *[]byte, _ *time.Time) { *body = []byte("{}") },
		"no body":         func(_ http.Header, body *[]byte, _ *time.Time) { *body = nil },
		"no signature":    func(h http.Header, _ *[]byte, _ *time.Time) { h.Del(webhook.HeaderSignature) },
		"other version":   func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderSignature, "v2"+vectorSignature[2:]) },
		"no version":      func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderSignature, vectorSignature[3:]) },
		"empty signature": func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderSignature, "v1,") },
		"short signature": func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderSignature, "v1,g0hM9SsE") },
		"garbage":         func(h http.Header, _ *[]byte, _ *time.Time) { h.Set(webhook.HeaderSignature, "\x00, v1,%%% ,,, v1") },
		"of the dot moved": func(h http.Header, body *[]byte, _ *time.Time) {
			h.Set(webhook.HeaderID, vectorID+".1614265330")
			*body = []byte(vectorBody)
		},
	} {
		h, body, at := http.Header{}, []byte(vectorBody), now
		require.NoError(t, webhook.Sign(h, vectorID, now, body, vectorSecret))
		require.NoError(t, webhook.Verify(vectorSecret, h, body, at))
		change(h, &body, &at)
		require.ErrorIs(t, webhook.Verify(vectorSecret, h, body, at), webhook.ErrSignature, name)
	}
	for _, secret := range []string{"", "whsec_", "whsec_%", "not base64"} {
		h := http.Header{}
		require.ErrorContains(t, webhook.Sign(h, "id", now, nil, secret), "base64")
		require.Empty(t, h)
		err := webhook.Verify(secret, h, nil, now)
		require.ErrorContains(t, err, "base64")
		require.NotErrorIs(t, err, webhook.ErrSignature)
	}
}

// TestSecrets: a secret depends on the key, the tenant and the version alone, and shows none of the others.
func TestSecrets(t *testing.T) {
	t.Parallel()
	k := keys(t)
	require.Equal(t, "whsec_ilhWZg6I1RVqkLzPcpFe0oCKHNQOc2HQ3s3kU0hnyPY=", k.Secret("acme", 1), "receivers keep it")
	require.Equal(t, k.Secret("acme", 1), keys(t).Secret("acme", 1))
	seen := map[string]bool{}
	for _, tenant := range []string{"acme", "acm", "globex"} {
		for version := range 20 {
			s := k.Secret(tenant, version+1)
			key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(s, "whsec_"))
			require.NoError(t, err)
			require.Len(t, key, 32)
			require.False(t, seen[s])
			seen[s] = true
		}
	}
	require.NotContains(t, k.String()+k.GoString(), "0123")
}

func TestKeyFile(t *testing.T) {
	t.Parallel()
	write := func(text string, mode os.FileMode) string {
		path := filepath.Join(t.TempDir(), "master")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		require.NoError(t, os.Chmod(path, mode))
		return path
	}
	long := strings.Repeat("k", 32)
	for path, says := range map[string]string{
		write(long, 0o604):                    "chmod o-r",
		write(long[1:], 0o600):                "has 31 bytes, at least 32 are needed",
		write(long[1:]+"\n\n", 0o600):         "has 31 bytes",
		write("", 0o600):                      "has 0 bytes",
		filepath.Join(t.TempDir(), "missing"): "no such file",
		t.TempDir():                           "read the master key",
	} {
		_, err := webhook.ReadKeys(path)
		require.ErrorContains(t, err, says)
	}
	_, err := webhook.ReadKeys(write(long+"\r\n", 0o640))
	require.NoError(t, err)
}

func TestPolicy(t *testing.T) {
	t.Parallel()
	p := webhook.Policy{}
	require.NoError(t, p.Check("https://example.com/hook?a=b"))
	require.NoError(t, p.Check("https://[2606:4700::1111]:8443"))
	for url, says := range map[string]string{
		"": "must be a URL", "example.com": "must be a URL", "ftp://example.com": "must be a URL", "https://": "must be a URL",
		"https://:443": "must be a URL", "https://a b": "must be a URL", "https://exa\nmple.com": "must be a URL",
		"http://example.com":                                 "must begin with https://",
		"https://user@example.com":                           "no user name",
		"https://user:pass@example.com":                      "no user name",
		"https://example.com/#x":                             "#fragment",
		"https://127.0.0.1":                                  "not a public address",
		"https://10.1.2.3/x":                                 "not a public address",
		"https://[::1]:1":                                    "not a public address",
		"https://[::ffff:169.254.169.254]":                   "not a public address",
		"https://localhost:99":                               "not a public address",
		"https://example.com/" + strings.Repeat("x", 10_000): "at most 2048 bytes",
	} {
		require.ErrorContains(t, p.Check(url), says, url)
	}
	require.NoError(t, p.Check("https://e.x/"+strings.Repeat("x", api.MaxCallbackURL-12)))
	p.AllowHTTP, p.AllowPrivate = true, true
	require.NoError(t, p.Check("http://127.0.0.1:9/hook"))
	require.Equal(t, "https://example.com:1", webhook.Origin("https://example.com:1/x?y"))
}

// TestOneServerHasOneOrigin: otherwise one could have as many queues, and slots, as it has spellings. It is
// short enough for the cursor of a list.
func TestOneServerHasOneOrigin(t *testing.T) {
	for _, url := range []string{"https://example.com/x", "HTTPS://Example.COM:443/y", "https://example.com.", "https://example.com:/?z"} {
		require.Equal(t, "https://example.com", webhook.Origin(url), url)
	}
	require.Equal(t, "https://example.com:444", webhook.Origin("https://example.com:444"))
	require.ErrorContains(t, webhook.Policy{}.Check("https://"+strings.Repeat("x", 300)+"/"), "253")
}
