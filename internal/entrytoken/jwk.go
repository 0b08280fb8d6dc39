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

// thumbprint returns the id of a key: the SHA-256 of its required members as JSON, in the order of
// their names (RFC 7638, RFC 8037 appendix A.3). It depends on the key alone, so all processes
// choose the same id.
func thumbprint(public ed25519.PublicKey) string {
	sum := sha256.Sum256(fmt.Appendf(nil, `{"crv":"Ed25519","kty":"OKP","x":"%s"}`,
		base64.RawURLEncoding.EncodeToString(public)))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// cookiePurpose separates the derived keys from those that may be derived for other purposes.
const cookiePurpose = "bulkaction broker visitor cookie v1"

// cookieKey derives the HMAC key of visitors' cookies from the secret of the token key (RFC 5869).
func (k key) cookieKey() []byte {
	derived, err := hkdf.Key(sha256.New, k.private.Seed(), nil, cookiePurpose, sha256.Size)
	if err != nil {
		panic(fmt.Errorf("derive a cookie key: %w", err)) // the length is fixed, and allowed
	}
	return derived
}
