package push

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// browserKey and browserAuth are the secrets of a browser's subscription.
var (
	browserKey  = ecdhOf(newKey())
	browserAuth = []byte("sixteen bytes 16")
)

func toWeb(endpoint string) string {
	return `{"to":{"webpush":` + subscriptionOf(endpoint) + `},"title":"Sale","body":"All half price"}`
}

func subscriptionOf(endpoint string) string {
	return `{"endpoint":"` + endpoint + `","p256dh":"` + encodeBase64(browserKey.PublicKey().Bytes()) + `","auth":"` + encodeBase64(browserAuth) + `"}`
}

// decrypt decrypts a message as a browser does (RFC 8291, 3.4, and RFC 8188, 2).
func decrypt(body, auth []byte, key *ecdh.PrivateKey) ([]byte, error) {
	if len(body) < 21 || len(body) < 21+int(body[20]) {
		return nil, errors.New("no header")
	}
	salt, recordSize, idLength := body[:16], binary.BigEndian.Uint32(body[16:20]), int(body[20])
	keyID, content := body[21:21+idLength], body[21+idLength:]
	if len(content) > int(recordSize) {
		return nil, errors.New("more than one record")
	}
	sender, err := ecdh.P256().NewPublicKey(keyID)
	if err != nil {
		return nil, err
	}
	shared, err := key.ECDH(sender)
	if err != nil {
		return nil, err
	}
	info := "WebPush: info\x00" + string(key.PublicKey().Bytes()) + string(keyID)
	ikm, err := hkdf.Key(sha256.New, shared, auth, info, 32)
	if err != nil {
		return nil, err
	}
	contentKey, err := hkdf.Key(sha256.New, ikm, salt, "Content-Encoding: aes128gcm\x00", 16)
	if err != nil {
		return nil, err
	}
	nonce, err := hkdf.Key(sha256.New, ikm, salt, "Content-Encoding: nonce\x00", 12)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(contentKey)
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	plain, err := gcm.Open(nil, nonce, content, nil)
	if err != nil {
		return nil, err
	}
	text, ok := strings.CutSuffix(strings.TrimRight(string(plain), "\x00"), "\x02")
	if !ok {
		return nil, errors.New("no end of the last record")
	}
	return []byte(text), nil
}

// TestDecrypt checks the test's own decrypt by the example of RFC 8291, section 5.
func TestDecrypt(t *testing.T) {
	decode := func(s string) []byte {
		b, err := decodeBase64(s)
		require.NoError(t, err)
		return b
	}
	key, err := ecdh.P256().NewPrivateKey(decode("q1dXpw3UpT5VOmu_cf_v6ih07Aems3njxI-JWgLcM94"))
	require.NoError(t, err)
	text, err := decrypt(decode("DGv6ra1nlYgDCS1FRnbzlwAAEABBBP4z9KsN6nGRTbVYI_c7VJSPQTBtkgcy27mlmlMoZIIgDll6e3vCYLocInmYWAmS6TlzAC8wEqKK6PBru3jl7A_"+
		"yl95bQpu6cVPTpK4Mqgkf1CXztLVBSt2Ks3oZwbuwXPXLWyouBWLVWGNWQexSgSxsj_Qulcy4a-fN"), decode("BTBZMqHH6r4Tts7J_aSIgg"), key)
	require.NoError(t, err)
	require.Equal(t, "When I grow up, I want to be a watermelon", string(text))
}

// startWebPush starts a fake of a push service, and a processor with one account of Web Push.
func startWebPush(t testing.TB, change func(*Config)) (*service, *Processor, *outcomes) {
	s := serve(t, status(http.StatusCreated, ""))
	o := &outcomes{}
	c := config(t, newFolder(t), webPushYAML)
	if change != nil {
		change(&c)
	}
	return s, start(t, c, WithChoice(o.choice)), o
}

func TestRequestsOfWebPush(t *testing.T) {
	s, p, _ := startWebPush(t, nil)
	to := `{"to":{"webpush":` + subscriptionOf(s.URL+"/push/secret") + `}`
	for name, tt := range map[string]struct {
		payload, text string
		header        map[string]string
	}{
		"text": {to + `,"title":"Sale","body":"All half price"}`, `{"title":"Sale","body":"All half price"}`,
			map[string]string{"Ttl": "2419200", "Urgency": "", "Topic": ""}},
		"data": {to + `,"data":{"a":{"b":1}}}`, `{"data":{"a":{"b":1}}}`, nil},
		"settings": {to + `,"ttl_seconds":60,"priority":"high","collapse_key":"sale"}`, `{}`,
			map[string]string{"Ttl": "60", "Urgency": "high", "Topic": "sale"}},
		"no topic": {to + `,"ttl_seconds":0,"collapse_key":"no/topic"}`, `{}`,
			map[string]string{"Ttl": "0", "Topic": webPushTopic("no/topic")}},
	} {
		t.Run(name, func(t *testing.T) {
			result, err := processor.Run(t.Context(), p, job(1, tt.payload))
			require.NoError(t, err)
			require.Equal(t, Result{Platform: WebPush, Code: 201}, result)
			r := s.last(t)
			require.Equal(t, "POST /push/secret", r.Method+" "+r.URL.Path)
			require.Equal(t, "aes128gcm", r.Header.Get("Content-Encoding"))
			for name, value := range tt.header {
				require.Equal(t, value, r.Header.Get(name), name)
			}
			text, err := decrypt(r.body, browserAuth, browserKey)
			require.NoError(t, err)
			require.JSONEq(t, tt.text, string(text))
			_, err = decrypt(r.body, browserAuth, ecdhOf(otherKey))
			require.Error(t, err, "nobody else can read it")
		})
	}
}

func TestTheTokenOfVAPID(t *testing.T) {
	s, p, _ := startWebPush(t, nil)
	_, err := processor.Run(t.Context(), p, job(1, toWeb(s.URL+"/push/secret")))
	require.NoError(t, err)
	rest, ok := strings.CutPrefix(s.last(t).Header.Get("Authorization"), "vapid t=")
	require.True(t, ok)
	text, public, ok := strings.Cut(rest, ", k=")
	require.True(t, ok)
	require.Equal(t, encodeBase64(ecdhOf(vapidKey).PublicKey().Bytes()), public)
	token, err := jwt.Parse(text, func(*jwt.Token) (any, error) { return &vapidKey.PublicKey, nil },
		jwt.WithValidMethods([]string{"ES256"}), jwt.WithAudience(s.URL), jwt.WithSubject("mailto:push@example.org"))
	require.NoError(t, err)
	expires, err := token.Claims.GetExpirationTime()
	require.NoError(t, err)
	require.WithinRange(t, expires.Time, time.Now(), time.Now().Add(24*time.Hour)) // RFC 8292, 2
}

func TestAnswersOfWebPush(t *testing.T) {
	s, p, o := startWebPush(t, nil)
	for name, tt := range map[string]row{
		"created":              {status: 201, kind: processor.Done, outcome: credential.Success},
		"accepted":             {status: 202, kind: processor.Done, outcome: credential.Success},
		"400":                  {status: 400, body: "SECRET", kind: processor.Fail, code: CodeInvalidArgument},
		"401":                  {status: 401, body: "SECRET", kind: processor.RetryLater, code: CodeCredentialRefused},
		"403":                  {status: 403, kind: processor.RetryLater, code: CodeCredentialRefused},
		"404":                  {status: 404, body: "SECRET", kind: processor.Fail, code: CodeUnregistered},
		"410":                  {status: 410, kind: processor.Fail, code: CodeUnregistered, mayContain: "push by webpush: status 410 Gone"},
		"413":                  {status: 413, kind: processor.Fail, code: CodeTooLarge},
		"429":                  {status: 429, kind: processor.Throttle, code: processor.CodeThrottled, after: time.Minute},
		"429 with Retry-After": {status: 429, header: "2", kind: processor.Throttle, code: processor.CodeThrottled, after: 2 * time.Second},
		"429 for a day":        {status: 429, header: "86400", kind: processor.Throttle, code: processor.CodeThrottled, after: 24 * time.Hour},
		"500":                  {status: 500, body: "SECRET", kind: processor.RetryLater, code: "PUSH_500"},
		"502":                  {status: 502, kind: processor.RetryLater, code: "PUSH_502"},
		"redirect":             {status: 302, kind: processor.RetryLater, code: "PUSH_302"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.check(t, s, p, o, toWeb(s.URL+"/push/secret"), "secret", strings.TrimPrefix(s.URL, "https://"), encodeBase64(browserAuth))
		})
	}
}

func TestAMessageThatIsTooLargeIsNotSent(t *testing.T) {
	s, p, o := startWebPush(t, nil)
	payload := `{"to":{"webpush":` + subscriptionOf(s.URL) + `},"body":"` + strings.Repeat("x", 4096) + `"}`
	_, err := processor.Run(t.Context(), p, job(1, payload))
	require.Equal(t, processor.Fail, processor.Classify(err).Kind)
	require.Equal(t, CodeTooLarge, processor.Classify(err).Code)
	require.Equal(t, credential.Unused, o.last(t).Kind)
	require.Empty(t, s.got())
}

func TestEndpointsThatAreNotPublic(t *testing.T) {
	s, p, o := startWebPush(t, func(c *Config) { c.AllowedCIDRs = nil })
	for _, endpoint := range []string{s.URL, "https://localhost" + s.URL[strings.LastIndexByte(s.URL, ':'):], "https://[::1]/", "https://10.0.0.1/", "https://169.254.169.254/"} {
		_, err := processor.Run(t.Context(), p, job(1, toWeb(endpoint)))
		v := processor.Classify(err)
		require.Equal(t, processor.Fail, v.Kind, endpoint)
		require.Equal(t, CodeAddressRefused, v.Code)
		require.NotContains(t, v.Message, strings.TrimPrefix(endpoint, "https://"))
		require.Equal(t, credential.Unused, o.last(t).Kind)
	}
	require.Empty(t, s.got())
	_, open, _ := startWebPush(t, func(c *Config) { c.AllowedCIDRs, c.AllowPrivate = []netip.Prefix{}, true })
	_, err := processor.Run(t.Context(), open, job(1, toWeb(s.URL)))
	require.NoError(t, err)
}

func TestAnEndpointThatDoesNotAnswer(t *testing.T) {
	s, p, o := startWebPush(t, nil)
	s.Close()
	_, err := processor.Run(t.Context(), p, job(1, toWeb(s.URL+"/secret")))
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, CodeUnreachable, v.Code)
	require.Equal(t, "push by webpush: the connection to the endpoint failed", v.Message)
	require.Equal(t, credential.Neutral, o.last(t).Kind, "the endpoint is the user's")

	p.config.Timeout = time.Nanosecond
	_, err = processor.Run(t.Context(), p, job(1, toWeb(s.URL+"/secret")))
	require.Equal(t, processor.CodeTimeout, processor.Classify(err).Code)
	require.Equal(t, credential.Neutral, o.last(t).Kind)
}

func TestKeysOfVAPID(t *testing.T) {
	want := ecdhOf(vapidKey)
	for name, content := range map[string]string{
		"base64url": encodeBase64(want.Bytes()), "padded": encodeBase64(want.Bytes()) + "=\n", "PEM": keyPEM(vapidKey),
	} {
		key, err := parseVAPIDKey([]byte(content))
		require.NoError(t, err, name)
		require.True(t, want.Equal(key), name)
	}
	wrongCurve, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	require.NoError(t, err)
	for name, content := range map[string]string{
		"nothing": "", "short": encodeBase64(want.Bytes()[:31]), "other curve": keyPEM(wrongCurve), "other PEM": keyPEM(serviceKey), "text": "a b",
	} {
		_, err := parseVAPIDKey([]byte(content))
		require.Error(t, err, name)
	}
}
