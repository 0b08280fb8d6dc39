package entry

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"
)

const (
	// fetchTime limits one fetch of the public keys, and each call by the default HTTP client.
	fetchTime = 3 * time.Second
	// fetchInterval is the shortest time between two fetches of the public keys, however many
	// tokens name unknown keys. So a flood of such tokens does not become a flood of fetches.
	fetchInterval = time.Minute
	// firstInterval replaces fetchInterval as long as there are no keys at all.
	firstInterval = time.Second
	// keyLife is the age at which the public keys are fetched again, so that a removed key does not
	// stay accepted for ever. Old keys stay in use while they can't be fetched.
	keyLife      = 5 * time.Minute
	maxJWKSBytes = 1 << 20
)

var errUnknownKey = errors.New("its key is not known")

// keySource holds the public keys, and fetches them when they are needed.
type keySource struct {
	url     string // "": the keys were given
	client  *http.Client
	log     *slog.Logger
	current atomic.Pointer[keySet]

	// turn is a lock: a goroutine holds it, by a value in the channel, while it fetches. Only the
	// holder uses the fields below.
	turn        chan struct{}
	nextFetchAt time.Time // no fetch begins earlier
	failed      error     // of the latest fetch
}

type keySet struct {
	byID    map[string]ed25519.PublicKey
	fetched time.Time
}

func newKeySource(c Config, log *slog.Logger) *keySource {
	s := &keySource{url: c.JWKSURL, client: httpClient(c.HTTPClient), log: log, turn: make(chan struct{}, 1)}
	if s.url == "" {
		s.url = c.PublicURL + "/.well-known/jwks.json"
	}
	set := &keySet{byID: map[string]ed25519.PublicKey{}}
	if len(c.Keys) > 0 {
		s.url = ""
		for _, key := range c.Keys {
			set.byID[keyID(key)] = key
		}
	}
	s.current.Store(set)
	return s
}

// keyID returns the id of a key as brokers choose it: its thumbprint by RFC 7638.
func keyID(public ed25519.PublicKey) string {
	sum := sha256.Sum256(fmt.Appendf(nil, `{"crv":"Ed25519","kty":"OKP","x":"%s"}`,
		base64.RawURLEncoding.EncodeToString(public)))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// start fetches the keys for the first time. After a success, a token with an unknown key may cause
// the next fetch at once.
func (s *keySource) start(ctx context.Context) {
	if s.url == "" {
		return
	}
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.refresh(ctx)
	if s.failed == nil {
		s.nextFetchAt = time.Time{}
	}
}

// find returns the public key with this id. If it is missing, find fetches the keys, or waits for a
// fetch that is under way. Old keys are fetched again, too, but only one caller waits for that. If
// the keys were given in Config, find fetches nothing.
func (s *keySource) find(ctx context.Context, id string) (ed25519.PublicKey, error) {
	set := s.current.Load()
	key := set.byID[id]
	if s.url == "" {
		return known(key)
	}
	if key != nil {
		if time.Since(set.fetched) < keyLife {
			return key, nil
		}
		select {
		case s.turn <- struct{}{}:
		default: // another goroutine is about to fetch
			return key, nil
		}
	} else {
		select {
		case s.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	defer func() { <-s.turn }()
	if s.current.Load() == set { // nobody has fetched in the meantime
		s.refresh(ctx)
	}
	key = s.current.Load().byID[id]
	if key == nil && s.failed != nil {
		return nil, ErrUnavailable
	}
	return known(key)
}

func known(key ed25519.PublicKey) (ed25519.PublicKey, error) {
	if key == nil {
		return nil, errUnknownKey
	}
	return key, nil
}

// refresh fetches the keys, unless it is too early. The caller must hold turn. A fetch serves all
// requests, so it continues when the request that caused it is cancelled.
func (s *keySource) refresh(ctx context.Context) {
	if time.Now().Before(s.nextFetchAt) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), fetchTime)
	defer cancel()
	keys, err := s.fetch(ctx)
	s.failed = err
	s.nextFetchAt = time.Now().Add(fetchInterval)
	if err == nil {
		s.current.Store(&keySet{byID: keys, fetched: time.Now()})
		return
	}
	old := len(s.current.Load().byID)
	if old == 0 {
		s.nextFetchAt = time.Now().Add(firstInterval)
	}
	s.log.Warn("the public keys of entry tokens could not be fetched", "url", s.url, "old_keys", old, "error", err)
}

func (s *keySource) fetch(ctx context.Context) (map[string]ed25519.PublicKey, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return nil, err
	}
	response, err := s.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", response.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxJWKSBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxJWKSBytes {
		return nil, fmt.Errorf("the answer has more than %d bytes", maxJWKSBytes)
	}
	return parseJWKS(text)
}

// parseJWKS returns the Ed25519 keys of a JWKS (RFC 7517, RFC 8037). It skips all others.
func parseJWKS(text []byte) (map[string]ed25519.PublicKey, error) {
	var document struct {
		Keys []struct{ Kty, Crv, X, Kid, Use, Alg string }
	}
	if err := json.Unmarshal(text, &document); err != nil {
		return nil, fmt.Errorf("the answer is no JWKS: %w", err)
	}
	keys := map[string]ed25519.PublicKey{}
	for _, k := range document.Keys {
		x, err := base64.RawURLEncoding.DecodeString(k.X)
		if err != nil || len(x) != ed25519.PublicKeySize || k.Kty != "OKP" || k.Crv != "Ed25519" || k.Kid == "" ||
			k.Use != "" && k.Use != "sig" || k.Alg != "" && k.Alg != "EdDSA" {
			continue
		}
		keys[k.Kid] = x
	}
	if len(keys) == 0 {
		return nil, errors.New("the answer has no Ed25519 key")
	}
	return keys, nil
}

// httpClient returns a copy of the given client, or one with the time limit fetchTime for nil, that
// follows no redirect: a redirect would send a token to another host, or fetch the public keys from
// it.
func httpClient(given *http.Client) *http.Client {
	c := &http.Client{Timeout: fetchTime}
	if given != nil {
		*c = *given
	}
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return c
}
