package entry_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/entry"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
)

const (
	publicURL = "https://tickets.example.com"
	event     = "spring-sale"
	user      = "dUKwnkXKRP2TR3gIJyS6rA"
)

var quiet = slog.New(slog.DiscardHandler)

// signer signs tokens as brokers do.
type signer struct {
	*entrytoken.Keys
	private ed25519.PrivateKey
}

func newSigner(t testing.TB) signer {
	t.Helper()
	text, err := entrytoken.GenerateKeys(1)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, entrytoken.WriteKeys(path, text))
	keys, err := entrytoken.Read(path, quiet)
	require.NoError(t, err)
	block, _ := pem.Decode(text)
	private, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	require.NoError(t, err)
	return signer{keys, private.(ed25519.PrivateKey)}
}

func (s signer) public() ed25519.PublicKey { return s.private.Public().(ed25519.PublicKey) }

// sign returns an entry token of this signer that is valid for life from now on. changes alter its
// claims before it is signed.
func (s signer) sign(t testing.TB, life time.Duration, changes ...func(c *entrytoken.Claims)) string {
	t.Helper()
	now := time.Now()
	c := entrytoken.Claims{
		Issuer: publicURL, User: user, Event: event, Fence: "17", IssuedAt: now, ExpiresAt: now.Add(life),
	}
	for _, change := range changes {
		change(&c)
	}
	token, err := s.Sign(c)
	require.NoError(t, err)
	return token
}

// brokers is a fake of the waiting room: an HTTP transport without a network. It serves the public
// keys of signers; without signers, requests fail as if the brokers were away.
type brokers struct {
	mu      sync.Mutex
	signers []signer
	answer  *answer       // instead of the JWKS
	release chan struct{} // unless nil, an answer waits for it
	fetches atomic.Int64
}

func (b *brokers) set(signers ...signer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.signers = signers
}

func (b *brokers) client() *http.Client { return &http.Client{Transport: b} }

func (b *brokers) RoundTrip(r *http.Request) (*http.Response, error) {
	b.fetches.Add(1)
	if b.release != nil {
		<-b.release
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case r.URL.String() != publicURL+"/.well-known/jwks.json":
		return answer{status: http.StatusNotFound}.response(), nil
	case b.answer != nil:
		return b.answer.response(), nil
	case len(b.signers) == 0:
		return nil, errors.New("connection refused")
	}
	var all []string
	for _, s := range b.signers {
		one := strings.TrimSuffix(strings.TrimPrefix(string(s.JWKS()), `{"keys":[`), "]}")
		all = append(all, one)
	}
	return answer{http.StatusOK, `{"keys":[` + strings.Join(all, ",") + `]}`}.response(), nil
}

type answer struct {
	status int
	body   string
}

func (a answer) response() *http.Response {
	w := httptest.NewRecorder()
	w.Header().Set("Location", "https://evil.example/jwks.json")
	w.WriteHeader(a.status)
	_, _ = w.WriteString(a.body)
	return w.Result()
}

func newVerifier(t testing.TB, c entry.Config) *entry.Verifier {
	t.Helper()
	if c.PublicURL == "" {
		c.PublicURL = publicURL
	}
	if c.Event == "" {
		c.Event = event
	}
	if c.Log == nil {
		c.Log = quiet
	}
	v, err := entry.New(t.Context(), c)
	require.NoError(t, err)
	return v
}

func TestVerifyReturnsTheClaims(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	b := &brokers{}
	b.set(s)
	for name, v := range map[string]*entry.Verifier{
		"fetched keys": newVerifier(t, entry.Config{HTTPClient: b.client()}),
		"given keys":   newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{newSigner(t).public(), s.public()}}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := time.Now().Truncate(time.Second)
			c, err := v.Verify(t.Context(), s.sign(t, time.Minute))
			require.NoError(t, err)
			require.Equal(t, entry.Claims{User: user, Event: event, Fence: "17", IssuedAt: c.IssuedAt, ExpiresAt: c.ExpiresAt}, c)
			require.False(t, c.IssuedAt.Before(before))
			require.False(t, c.ExpiresAt.Before(before.Add(time.Minute)))
		})
	}
	require.EqualValues(t, 1, b.fetches.Load(), "the keys are fetched at the start alone")
}

func TestVerifyRefuses(t *testing.T) {
	t.Parallel()
	s, foreign := newSigner(t), newSigner(t)
	b := &brokers{}
	b.set(s)
	good := s.sign(t, time.Hour)
	unverified, _, err := jwt.NewParser().ParseUnverified(good, jwt.MapClaims{})
	require.NoError(t, err)
	kid := unverified.Header["kid"]
	forge := func(method jwt.SigningMethod, secret any, headers map[string]any, without ...string) string {
		body := jwt.MapClaims{
			"iss": publicURL, "aud": event, "sub": user, "evt": event, "jti": "17", "iat": 1, "exp": 4e9,
		}
		for _, claim := range without {
			delete(body, claim)
		}
		token := jwt.NewWithClaims(method, body)
		token.Header["kid"] = kid
		for name, value := range headers {
			token.Header[name] = value
		}
		signed, err := token.SignedString(secret)
		require.NoError(t, err)
		return signed
	}
	withClaims := func(change func(c *entrytoken.Claims)) string { return s.sign(t, time.Hour, change) }
	_, err = newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}}).
		Verify(t.Context(), forge(jwt.SigningMethodEdDSA, s.private, nil))
	require.NoError(t, err, "the forger's tokens are right except for what each case changes")

	// A host of an attacker that publishes the foreign key. asked counts its requests.
	var asked atomic.Int64
	host := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_, _ = w.Write(foreign.JWKS())
	}))
	t.Cleanup(host.Close)

	for name, c := range map[string]struct{ token, want string }{
		"alg none": {forge(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, nil), "signature is invalid"},
		"HS256 with the public key": {
			forge(jwt.SigningMethodHS256, []byte(s.public()), nil), "signature is invalid"},
		"HS256 with the JWKS":     {forge(jwt.SigningMethodHS256, s.JWKS(), nil), "signature is invalid"},
		"an alg nobody knows":     {forge(renamed{jwt.SigningMethodEdDSA}, s.private, nil), "can't be verified"},
		"another key":             {foreign.sign(t, time.Hour), "its key is not known"},
		"another key, our kid":    {forge(jwt.SigningMethodEdDSA, foreign.private, nil), "signature is invalid"},
		"no kid":                  {forge(jwt.SigningMethodEdDSA, s.private, map[string]any{"kid": nil}), "its key is not known"},
		"kid is a number":         {forge(jwt.SigningMethodEdDSA, s.private, map[string]any{"kid": 1}), "its key is not known"},
		"kid is a path":           {forge(jwt.SigningMethodEdDSA, s.private, map[string]any{"kid": "../../etc/passwd"}), "its key is not known"},
		"jku":                     {forge(jwt.SigningMethodEdDSA, foreign.private, map[string]any{"kid": "f", "jku": host.URL}), "its key is not known"},
		"x5u":                     {forge(jwt.SigningMethodEdDSA, foreign.private, map[string]any{"x5u": host.URL}), "signature is invalid"},
		"another issuer":          {withClaims(func(c *entrytoken.Claims) { c.Issuer = "https://evil.example" }), "its issuer is not PublicURL"},
		"another audience":        {withClaims(func(c *entrytoken.Claims) { c.Audience = "other" }), "for another audience"},
		"another event":           {withClaims(func(c *entrytoken.Claims) { c.Event, c.Audience = "other", event }), "for another event"},
		"another event's token":   {withClaims(func(c *entrytoken.Claims) { c.Event = "other" }), "for another audience"},
		"expired":                 {s.sign(t, -time.Minute), "it has expired"},
		"no exp":                  {forge(jwt.SigningMethodEdDSA, s.private, nil, "exp"), "required claim"},
		"no aud":                  {forge(jwt.SigningMethodEdDSA, s.private, nil, "aud"), "required claim"},
		"no iss":                  {forge(jwt.SigningMethodEdDSA, s.private, nil, "iss"), "its issuer is not PublicURL"},
		"no evt":                  {forge(jwt.SigningMethodEdDSA, s.private, nil, "evt"), "for another event"},
		"no sub":                  {forge(jwt.SigningMethodEdDSA, s.private, nil, "sub"), "no user"},
		"no jti":                  {forge(jwt.SigningMethodEdDSA, s.private, nil, "jti"), "no fence"},
		"without its signature":   {good[:strings.LastIndex(good, ".")+1], "signature is invalid"},
		"with another signature":  {good[:len(good)-4] + "AAAA", "signature is invalid"},
		"empty":                   {"", "malformed"},
		"text":                    {"a-secret", "malformed"},
		"of the wrong types":      {"eyJhbGciOiJFZERTQSJ9.eyJleHAiOiJhLXNlY3JldCJ9.AAAA", "malformed"},
		"longer than any token":   {good + strings.Repeat("A", 64<<10), "at most 4096 are allowed"},
		"JSON instead of a token": {`{"alg":"none"}.{}.`, "malformed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVerifier(t, entry.Config{HTTPClient: b.client(), Leeway: entry.MaxLeeway})
			got, err := v.Verify(t.Context(), c.token)
			require.ErrorIs(t, err, entry.ErrInvalid)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "a-secret", "errors are logged")
			require.Zero(t, got)
		})
	}
	t.Cleanup(func() { require.Zero(t, asked.Load(), "a token's header must not say where its key is") })
}

// renamed is a signing method whose name in the token's header, EdDSA2, no program knows.
type renamed struct{ jwt.SigningMethod }

func (renamed) Alg() string { return "EdDSA2" }

func TestLeeway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		given := []ed25519.PublicKey{s.public()}
		exact := newVerifier(t, entry.Config{Keys: given})
		late := newVerifier(t, entry.Config{Keys: given, Leeway: entry.MaxLeeway})
		token := s.sign(t, time.Minute)
		check := func(want, wantLate error) {
			t.Helper()
			_, err := exact.Verify(t.Context(), token)
			require.ErrorIs(t, err, want)
			_, err = late.Verify(t.Context(), token)
			require.ErrorIs(t, err, wantLate)
		}
		check(nil, nil)
		time.Sleep(time.Minute - time.Millisecond)
		check(nil, nil)
		time.Sleep(time.Millisecond)
		check(entry.ErrExpired, nil)
		time.Sleep(entry.MaxLeeway - time.Millisecond)
		check(entry.ErrExpired, nil)
		time.Sleep(time.Millisecond)
		check(entry.ErrExpired, entry.ErrExpired)
		require.ErrorIs(t, entry.ErrExpired, entry.ErrInvalid)
	})
}

// TestClockBehind: a token that was issued a minute after our present time is accepted.
func TestClockBehind(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	v := newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}})
	_, err := v.Verify(t.Context(), s.sign(t, time.Hour, func(c *entrytoken.Claims) { c.IssuedAt = time.Now().Add(time.Minute) }))
	require.NoError(t, err)
}

func TestAudienceAndIssuer(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	v := newVerifier(t, entry.Config{PublicURL: publicURL + "/", Audience: "shop", Keys: []ed25519.PublicKey{s.public()}})
	_, err := v.Verify(t.Context(), s.sign(t, time.Hour, func(c *entrytoken.Claims) { c.Audience = "shop" }))
	require.NoError(t, err)
	_, err = v.Verify(t.Context(), s.sign(t, time.Hour))
	require.ErrorIs(t, err, entry.ErrInvalid)
	require.Equal(t, publicURL+"/events/"+event+"/wait", v.WaitURL())
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config entry.Config
		want   string
	}{
		"no PublicURL":        {entry.Config{Event: event}, "PublicURL is missing"},
		"a path":              {entry.Config{PublicURL: "/room", Event: event}, "PublicURL \"/room\": must be http(s)://host"},
		"another scheme":      {entry.Config{PublicURL: "ftp://host", Event: event}, "must be http(s)://host"},
		"a query":             {entry.Config{PublicURL: publicURL + "?a=b", Event: event}, "must be http(s)://host"},
		"a password":          {entry.Config{PublicURL: "https://u:secret@host", Event: event}, "must not contain a user or password"},
		"no URL":              {entry.Config{PublicURL: "https://secret%zz", Event: event}, "PublicURL is not a URL"},
		"no event":            {entry.Config{PublicURL: publicURL}, `Event "": must be 1 to 128 letters`},
		"a bad event":         {entry.Config{PublicURL: publicURL, Event: "a/b"}, `Event "a/b": must be`},
		"a long event":        {entry.Config{PublicURL: publicURL, Event: strings.Repeat("a", 129)}, "must be 1 to 128"},
		"a negative leeway":   {entry.Config{PublicURL: publicURL, Event: event, Leeway: -1}, "Leeway -1ns: must be 0 to 5s"},
		"a long leeway":       {entry.Config{PublicURL: publicURL, Event: event, Leeway: 6 * time.Second}, "Leeway 6s: must be 0 to 5s"},
		"a bad JWKSURL":       {entry.Config{PublicURL: publicURL, Event: event, JWKSURL: "keys"}, `JWKSURL "keys": must be`},
		"two sources of keys": {entry.Config{PublicURL: publicURL, Event: event, JWKSURL: publicURL, Keys: make([]ed25519.PublicKey, 1)}, "only one of them"},
		"a short key":         {entry.Config{PublicURL: publicURL, Event: event, Keys: []ed25519.PublicKey{{1}}}, "Keys[0]: an Ed25519 key has 32 bytes, this one 1"},
		"online without API":  {entry.Config{PublicURL: publicURL, Event: event, Online: true}, "APIURL is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v, err := entry.New(t.Context(), c.config)
			require.Nil(t, v)
			require.ErrorContains(t, err, "entry: ")
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "secret")
		})
	}
}

func BenchmarkVerify(b *testing.B) {
	s := newSigner(b)
	v := newVerifier(b, entry.Config{Keys: []ed25519.PublicKey{s.public()}})
	token := s.sign(b, time.Hour)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := v.Verify(b.Context(), token); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRefuse measures the refusal of a token with an unknown key, which needs no check of a
// signature.
func BenchmarkRefuse(b *testing.B) {
	s := newSigner(b)
	_, other, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(b, err)
	v := newVerifier(b, entry.Config{Keys: []ed25519.PublicKey{other.Public().(ed25519.PublicKey)}})
	token := s.sign(b, time.Hour)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := v.Verify(b.Context(), token); !errors.Is(err, entry.ErrInvalid) {
			b.Fatal(fmt.Errorf("got %w", err))
		}
	}
}
