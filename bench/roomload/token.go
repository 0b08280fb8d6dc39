package roomload

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// longestToken is the contract's limit of a token, in bytes.
const longestToken = 600

// verifier verifies entry tokens offline, as a service behind the waiting room does. It shares no
// code with package entry, so that it can find faults of that package.
type verifier struct {
	issuer string
	keys   map[string]ed25519.PublicKey // by kid
}

// newVerifier returns a verifier with the public keys that the brokers publish at url, a JSON Web
// Key Set.
func newVerifier(ctx context.Context, url, issuer string) (*verifier, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("fetch keys: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("fetch keys: %s", resp.Status)
	}
	var set struct {
		Keys []struct{ Kty, Crv, Kid, X string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&set); err != nil {
		return nil, fmt.Errorf("fetch keys: %w", err)
	}
	v := &verifier{issuer: issuer, keys: map[string]ed25519.PublicKey{}}
	for _, k := range set.Keys {
		x, err := base64.RawURLEncoding.DecodeString(k.X)
		if err == nil && k.Kty == "OKP" && k.Crv == "Ed25519" && len(x) == ed25519.PublicKeySize {
			v.keys[k.Kid] = x
		}
	}
	if len(v.keys) == 0 {
		return nil, errors.New("fetch keys: there is no Ed25519 key")
	}
	return v, nil
}

type claims struct {
	jwt.RegisteredClaims
	Event string `json:"evt"`
}

// verify checks the signature and the claims of a token that this user of the event received at the
// time now. It returns the token's fence, and its expiry in µs.
func (v *verifier) verify(token, user, event string, now time.Time) (fence, expires int64, err error) {
	if len(token) > longestToken {
		return 0, 0, fmt.Errorf("the token has %d bytes, more than %d", len(token), longestToken)
	}
	var c claims
	_, err = jwt.ParseWithClaims(token, &c, func(t *jwt.Token) (any, error) {
		kid, _ := t.Header["kid"].(string)
		key, known := v.keys[kid]
		if !known {
			return nil, fmt.Errorf("no key %q", kid)
		}
		return key, nil
	},
		jwt.WithValidMethods([]string{"EdDSA"}), jwt.WithExpirationRequired(), jwt.WithIssuedAt(),
		jwt.WithIssuer(v.issuer), jwt.WithAudience(event), jwt.WithSubject(user),
		jwt.WithLeeway(Leeway*time.Microsecond), jwt.WithTimeFunc(func() time.Time { return now }))
	if err != nil {
		return 0, 0, fmt.Errorf("the token is not valid: %w", err)
	}
	if c.Event != event {
		return 0, 0, errors.New("the token is for another event")
	}
	if fence, err = strconv.ParseInt(c.ID, 10, 64); err != nil || fence <= 0 {
		return 0, 0, fmt.Errorf("the jti of the token is %q", c.ID)
	}
	return fence, c.ExpiresAt.UnixMicro(), nil
}
