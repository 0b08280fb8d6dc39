package entrytoken_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
)

// generate returns n new keys as a PEM file.
func generate(t testing.TB, n int) []byte {
	t.Helper()
	text, err := entrytoken.GenerateKeys(n)
	require.NoError(t, err)
	return text
}

// file writes text to a new file and returns the file's path.
func file(t testing.TB, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, entrytoken.WriteKeys(path, text))
	return path
}

func read(t testing.TB, text []byte) *entrytoken.Keys {
	t.Helper()
	keys, err := entrytoken.Read(file(t, text), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return keys
}

// private parses the private keys of a PEM file without the code under test, as another program
// would.
func private(t *testing.T, text []byte) (all []ed25519.PrivateKey) {
	t.Helper()
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		require.NoError(t, err)
		all = append(all, parsed.(ed25519.PrivateKey))
	}
	return all
}

var issued = time.Date(2026, 11, 23, 10, 0, 0, 999e6, time.UTC)

func claims() entrytoken.Claims {
	return entrytoken.Claims{
		Issuer: "https://tickets.example.com", User: "dUKwnkXKRP2TR3gIJyS6rA", Event: "spring-sale", Fence: "4711",
		IssuedAt: issued, ExpiresAt: issued.Add(5 * time.Minute),
	}
}

func TestTokenHasTheClaimsOfTheDesign(t *testing.T) {
	t.Parallel()
	text := generate(t, 1)
	token, err := read(t, text).Sign(claims())
	require.NoError(t, err)
	require.LessOrEqual(t, len(token), 600)

	head, rest, _ := strings.Cut(token, ".")
	body, _, _ := strings.Cut(rest, ".")
	decode := func(part string) map[string]any {
		raw, err := base64.RawURLEncoding.DecodeString(part)
		require.NoError(t, err)
		var v map[string]any
		require.NoError(t, json.Unmarshal(raw, &v))
		return v
	}
	header := decode(head)
	require.Len(t, header["kid"], 43)
	require.Equal(t, map[string]any{"alg": "EdDSA", "typ": "JWT", "kid": header["kid"]}, header)
	require.Equal(t, map[string]any{
		"iss": "https://tickets.example.com", "aud": "spring-sale", "sub": "dUKwnkXKRP2TR3gIJyS6rA", "evt": "spring-sale",
		"jti": "4711", "iat": float64(issued.Unix()), "exp": float64(issued.Unix() + 300),
	}, decode(body))
	parsed, err := jwt.Parse(token, func(*jwt.Token) (any, error) { return private(t, text)[0].Public(), nil },
		jwt.WithTimeFunc(func() time.Time { return issued }))
	require.NoError(t, err)
	require.True(t, parsed.Valid)
}

// TestTokenLength: a token has at most 600 bytes if its issuer, audience, user and event together
// have 200 characters, as the comment of maxTokenBytes says.
func TestTokenLength(t *testing.T) {
	t.Parallel()
	c := claims()
	c.Issuer = "https://" + strings.Repeat("i", 52)
	c.Event, c.Audience, c.User = strings.Repeat("e", 40), strings.Repeat("a", 40), strings.Repeat("u", 60)
	c.Fence = "1234567890"
	token, err := read(t, generate(t, 1)).Sign(c)
	require.NoError(t, err)
	require.LessOrEqual(t, len(token), 600)
}

func TestSignNeedsAllClaims(t *testing.T) {
	t.Parallel()
	keys := read(t, generate(t, 1))
	for name, change := range map[string]func(c *entrytoken.Claims){
		"iss": func(c *entrytoken.Claims) { c.Issuer = "" },
		"sub": func(c *entrytoken.Claims) { c.User = "" },
		"evt": func(c *entrytoken.Claims) { c.Event, c.Audience = "", "x" },
		"jti": func(c *entrytoken.Claims) { c.Fence = "" },
		"iat": func(c *entrytoken.Claims) { c.IssuedAt = time.Time{} },
		"exp": func(c *entrytoken.Claims) { c.ExpiresAt = time.Time{} },
	} {
		c := claims()
		change(&c)
		_, err := keys.Sign(c)
		require.ErrorContains(t, err, "the claim "+name+" is missing")
	}
}

func TestVerifyReturnsWhatWasSigned(t *testing.T) {
	t.Parallel()
	keys := read(t, generate(t, 2))
	c := claims()
	c.Audience = "shop"
	token, err := keys.Sign(c)
	require.NoError(t, err)
	got, err := keys.Verify(token) // it has expired by this machine's clock, which does not count
	require.NoError(t, err)
	require.True(t, got.IssuedAt.Equal(issued.Truncate(time.Second)))
	require.True(t, got.ExpiresAt.Equal(c.ExpiresAt.Truncate(time.Second)))
	got.IssuedAt, got.ExpiresAt = c.IssuedAt, c.ExpiresAt
	require.Equal(t, c, got)
}

func TestVerifyRefusesForgeries(t *testing.T) {
	t.Parallel()
	text := generate(t, 1)
	keys := read(t, text)
	own := private(t, text)[0]
	_, foreign, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	good, err := keys.Sign(claims())
	require.NoError(t, err)
	unverified, _, err := jwt.NewParser().ParseUnverified(good, jwt.MapClaims{})
	require.NoError(t, err)
	kid := unverified.Header["kid"]

	forge := func(method jwt.SigningMethod, secret any, headers map[string]any, without ...string) string {
		body := jwt.MapClaims{"iss": "i", "aud": "a", "sub": "s", "evt": "e", "jti": "1", "iat": 1, "exp": 4e9}
		for _, claim := range without {
			delete(body, claim)
		}
		token := jwt.NewWithClaims(method, body)
		for name, value := range headers {
			token.Header[name] = value
		}
		signed, err := token.SignedString(secret)
		require.NoError(t, err)
		return signed
	}
	head, rest, _ := strings.Cut(good, ".")
	body, signature, _ := strings.Cut(rest, ".")
	withKid := map[string]any{"kid": kid}
	for name, c := range map[string]struct{ token, want string }{
		"alg none":     {forge(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, withKid), "signature is invalid"},
		"no signature": {head + "." + body + ".", "signature is invalid"},
		"HS256 with the public key": {
			forge(jwt.SigningMethodHS256, []byte(own.Public().(ed25519.PublicKey)), withKid), "signature is invalid"},
		"another key": {forge(jwt.SigningMethodEdDSA, foreign, withKid), "signature is invalid"},
		"unknown kid": {forge(jwt.SigningMethodEdDSA, own, map[string]any{"kid": "x"}), "its key is not known"},
		"no kid":      {forge(jwt.SigningMethodEdDSA, own, nil), "its key is not known"},
		"kid is no string": {
			forge(jwt.SigningMethodEdDSA, own, map[string]any{"kid": []string{"x"}}), "its key is not known"},
		"a key of its own": {forge(jwt.SigningMethodEdDSA, foreign, map[string]any{
			"kid": "x", "jku": "http://127.0.0.1:1/jwks.json", "x5u": "http://127.0.0.1:1/",
			"jwk": map[string]string{"kty": "OKP"},
		}), "its key is not known"},
		"no exp":       {forge(jwt.SigningMethodEdDSA, own, withKid, "exp"), "the claim exp is missing"},
		"no evt":       {forge(jwt.SigningMethodEdDSA, own, withKid, "evt"), "the claim evt is missing"},
		"no jti":       {forge(jwt.SigningMethodEdDSA, own, withKid, "jti"), "the claim jti is missing"},
		"other claims": {head + "." + body[:len(body)-4] + "AAAA." + signature, ""},
		"empty":        {"", "malformed"},
		"text":         {"secret-token", "malformed"},
		"four parts":   {good + ".x", "malformed"},
		"too long":     {good + strings.Repeat("x", 5000), "at most 4096 are allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := keys.Verify(c.token)
			require.ErrorIs(t, err, entrytoken.ErrInvalid)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "secret-token")
			require.Zero(t, got)
		})
	}
}

func TestReadTellsWhatIsWrong(t *testing.T) {
	t.Parallel()
	two := generate(t, 2)
	blocks := strings.SplitAfter(string(two), "-----END PRIVATE KEY-----\n")
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(ec)
	require.NoError(t, err)
	other := string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	damaged := strings.Replace(blocks[0], "-----END", "----END", 1)
	for name, c := range map[string]struct{ text, want string }{
		"empty":                {"", "there is no PEM block"},
		"no PEM":               {"hello", "openssl genpkey -algorithm ed25519"},
		"another kind of key":  {blocks[0] + other, "block 2 holds a key of the type *ecdsa.PrivateKey"},
		"encrypted":            {strings.ReplaceAll(blocks[0], "PRIVATE", "ENCRYPTED PRIVATE"), `block 1 is of the type "ENCRYPTED PRIVATE KEY"`},
		"a public key":         {blocks[0] + strings.ReplaceAll(blocks[1], "PRIVATE", "PUBLIC"), `block 2 is of the type "PUBLIC KEY"`},
		"not PKCS #8":          {blocks[0] + "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "block 2 is no PKCS #8 private key"},
		"the first is damaged": {damaged + blocks[1], "block 1 is damaged"},
		"the last is damaged":  {blocks[1] + damaged, "block 2 is damaged"},
		"the same key twice":   {blocks[0] + blocks[1] + blocks[0], "block 3 has the same key as block 1"},
		"too many":             {string(generate(t, 101)), "more than 100 keys"},
		"too large":            {string(two) + strings.Repeat(" ", 1<<20), "more than 1048576 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := file(t, []byte(c.text))
			_, err := entrytoken.Read(path, slog.New(slog.DiscardHandler))
			require.ErrorContains(t, err, "read token keys in "+path)
			require.ErrorContains(t, err, c.want)
		})
	}
	t.Run("no file", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "none.pem")
		_, err := entrytoken.Read(path, slog.New(slog.DiscardHandler))
		require.EqualError(t, err, "read token keys in "+path+": no such file or directory")
	})
	t.Run("readable by others", func(t *testing.T) {
		t.Parallel()
		path := file(t, two)
		require.NoError(t, os.Chmod(path, 0o644))
		_, err := entrytoken.Read(path, slog.New(slog.DiscardHandler))
		require.ErrorContains(t, err, "others may read it (mode 0644)")
	})
	t.Run("with text around the blocks", func(t *testing.T) {
		t.Parallel()
		keys := read(t, []byte("# the new key\n"+blocks[0]+"\n# the old key\n"+blocks[1]+"\n"))
		require.Len(t, keys.CookieKeys(), 2)
	})
}

func TestWriteKeys(t *testing.T) {
	t.Parallel()
	path := file(t, generate(t, 1))
	next := generate(t, 1)
	require.NoError(t, entrytoken.WriteKeys(path, next)) // replaces the file
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, next, got)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	require.Error(t, entrytoken.WriteKeys(filepath.Join(path, "below", "a", "file"), next))
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1, "no temporary file stays")
}

// TestDerivedValuesAreStable: who reads the same token keys twice gets the same JWKS and cookie
// keys. For the key of RFC 8037 they have fixed values.
func TestDerivedValuesAreStable(t *testing.T) {
	t.Parallel()
	text := generate(t, 2)
	one, other := read(t, text), read(t, text)
	require.Equal(t, string(one.JWKS()), string(other.JWKS()))
	require.Equal(t, one.CookieKeys(), other.CookieKeys())
	require.Len(t, one.CookieKeys(), 2)
	require.Len(t, one.CookieKeys()[0], 32)
	require.NotEqual(t, one.CookieKeys()[0], one.CookieKeys()[1])

	// The test uses the key of RFC 8037, appendices A.1 to A.3, and expects the JWK and the id
	// given there.
	seed, err := base64.RawURLEncoding.DecodeString("nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A")
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(ed25519.NewKeyFromSeed(seed))
	require.NoError(t, err)
	keys := read(t, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	require.JSONEq(t, `{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
		"kid": "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k", "use": "sig", "alg": "EdDSA"}]}`, string(keys.JWKS()))
	// The derived cookie keys must not change between versions: otherwise all visitors would lose
	// their places.
	require.Equal(t, "97aYvmAAEYGNa12UI5Snb8rgyXAhuWoODt4W4W1Dajk", base64.RawURLEncoding.EncodeToString(keys.CookieKeys()[0]))
}

// TestRotation: during a rotation, a token of the old key is accepted as long as the file contains
// the key.
func TestRotation(t *testing.T) {
	t.Parallel()
	oldKey, newKey := string(generate(t, 1)), string(generate(t, 1))
	before, added := read(t, []byte(oldKey)), read(t, []byte(oldKey+newKey))
	changed, after := read(t, []byte(newKey+oldKey)), read(t, []byte(newKey))
	old, err := added.Sign(claims())
	require.NoError(t, err)
	next, err := changed.Sign(claims())
	require.NoError(t, err)
	for _, c := range []struct {
		keys      *entrytoken.Keys
		old, next bool
	}{{before, true, false}, {added, true, true}, {changed, true, true}, {after, false, true}} {
		_, err := c.keys.Verify(old)
		require.Equal(t, c.old, err == nil, err)
		_, err = c.keys.Verify(next)
		require.Equal(t, c.next, err == nil, err)
	}
	require.Equal(t, before.CookieKeys()[0], added.CookieKeys()[0])
	require.Equal(t, after.CookieKeys()[0], changed.CookieKeys()[0])
}

// records is a slog.Handler that sends each record to the channel. Its method next waits for the
// next record, and ends the test unless level and text are as expected.
type records chan slog.Record

func (r records) Enabled(context.Context, slog.Level) bool        { return true }
func (r records) Handle(_ context.Context, rec slog.Record) error { r <- rec; return nil }
func (r records) WithAttrs([]slog.Attr) slog.Handler              { return r }
func (r records) WithGroup(string) slog.Handler                   { return r }
func (r records) next(t *testing.T, level slog.Level, want string) {
	t.Helper()
	rec := <-r
	text := rec.Message
	rec.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	require.Equal(t, level, rec.Level, text)
	require.Contains(t, text, want)
}

func TestWatchUsesTheKeysOfAChangedFile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		oldKey, newKey := string(generate(t, 1)), string(generate(t, 1))
		path := file(t, []byte(oldKey))
		logged := make(records, 10)
		keys, err := entrytoken.Read(path, slog.New(logged))
		require.NoError(t, err)
		old, err := keys.Sign(claims())
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); keys.Watch(ctx) }()

		require.NoError(t, entrytoken.WriteKeys(path, []byte(oldKey+newKey)))
		logged.next(t, slog.LevelInfo, "token keys changed keys=2")
		require.Len(t, keys.CookieKeys(), 2)

		require.NoError(t, entrytoken.WriteKeys(path, []byte(newKey+"-----BEGIN PRIVATE KEY-----\n")))
		logged.next(t, slog.LevelError, path+": block 2 is damaged")
		require.Len(t, keys.CookieKeys(), 2, "the old keys stay in use")
		_, err = keys.Verify(old)
		require.NoError(t, err)

		require.NoError(t, entrytoken.WriteKeys(path, []byte(newKey))) // too early: tokens are still valid
		logged.next(t, slog.LevelInfo, "token keys changed keys=1")
		logged.next(t, slog.LevelWarn, "the key that signed until now was removed")
		_, err = keys.Verify(old)
		require.ErrorIs(t, err, entrytoken.ErrInvalid)

		require.NoError(t, os.Remove(path))
		logged.next(t, slog.LevelError, "no such file")
		_, err = keys.Sign(claims())
		require.NoError(t, err)
		cancel()
		<-ended
		require.Empty(t, logged, "each mistake is logged once")
	})
}

func BenchmarkSign(b *testing.B) {
	keys := read(b, generate(b, 1))
	c := claims()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := keys.Sign(c); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	keys := read(b, generate(b, 1))
	token, err := keys.Sign(claims())
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := keys.Verify(token); err != nil {
			b.Fatal(err)
		}
	}
}
