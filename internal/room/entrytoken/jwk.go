package entrytoken

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
)

// jwk is a public key by RFC 8037.
type jwk struct {
	Kty string `json:"kty"`
	Crv string `json:"crv"`
	X   string `json:"x"`
	Kid string `json:"kid"`
	Use string `json:"use"`
	Alg string `json:"alg"`
}

func newJWK(k key) jwk {
	x := base64.RawURLEncoding.EncodeToString(k.public())
	return jwk{Kty: "OKP", Crv: "Ed25519", X: x, Kid: k.id, Use: "sig", Alg: "EdDSA"}
}

// thumbprint returns the id of a token key: the SHA-256 of the JWK's required members as JSON, in
// the order of their names (RFC 7638, RFC 8037 appendix A.3). It depends only on the key, so all
// processes compute the same id.
func thumbprint(public ed25519.PublicKey) string {
	sum := sha256.Sum256(fmt.Appendf(nil, `{"crv":"Ed25519","kty":"OKP","x":"%s"}`,
		base64.RawURLEncoding.EncodeToString(public)))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// cookiePurpose is the label in the derivation of cookie keys. It makes them differ from keys that
// may be derived for other purposes.
const cookiePurpose = "bulkaction broker visitor cookie v1"

// cookieKey derives the HMAC key that signs visitors' cookies from the secret of a token key, by
// HKDF (RFC 5869).
func (k key) cookieKey() []byte {
	derived, err := hkdf.Key(sha256.New, k.private.Seed(), nil, cookiePurpose, sha256.Size)
	if err != nil {
		panic(fmt.Errorf("derive a cookie key: %w", err)) // the length is fixed, and allowed
	}
	return derived
}
