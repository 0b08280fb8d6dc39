package entrytoken

import (
	"errors"
	"fmt"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// ErrInvalid means that a text is no token or too long, that a token was not signed by one of the
// keys, or that a claim is missing. It does not mean that a token has expired.
var ErrInvalid = errors.New("the entry token is not valid")

// maxTokenBytes is the length of the longest token that Verify decodes. A token that Sign returns
// has at most 600 bytes if issuer, audience, user and event together have at most 200 characters.
const maxTokenBytes = 4096

// Claims are the content of an entry token: this user may be inside this event until ExpiresAt.
type Claims struct {
	Issuer    string // BROKER_PUBLIC_URL
	Audience  string // BROKER_TOKEN_AUDIENCE; "" stands for the event
	User      string
	Event     string
	Fence     string    // the number of the promotion
	IssuedAt  time.Time // Redis's time
	ExpiresAt time.Time
}

// payload is the form of Claims in the JWT. It has no claim nbf (not before), because a service
// whose clock is 2 s slow would then refuse a new token.
type payload struct {
	jwt.Claims `json:"-"` // nil: the parser calls no method of it, because it validates no claims

	Iss string `json:"iss"`
	Aud string `json:"aud"`
	Sub string `json:"sub"`
	Evt string `json:"evt"`
	Jti string `json:"jti"`
	Iat int64  `json:"iat"`
	Exp int64  `json:"exp"`
}

// Sign returns the token with these claims. The times are rounded down to seconds: a token never
// lives longer than its slot is held. Sign takes about 30 µs, so do not call it in a loop over many
// users that others wait for.
func (k *Keys) Sign(c Claims) (string, error) {
	p := payload{
		Iss: c.Issuer, Aud: c.Audience, Sub: c.User, Evt: c.Event, Jti: c.Fence,
		Iat: c.IssuedAt.Unix(), Exp: c.ExpiresAt.Unix(),
	}
	if p.Aud == "" {
		p.Aud = c.Event
	}
	if field := p.missing(); field != "" {
		return "", fmt.Errorf("sign an entry token: the claim %s is missing", field)
	}
	signer := k.current.Load().keys[0]
	t := jwt.NewWithClaims(jwt.SigningMethodEdDSA, p)
	t.Header["kid"] = signer.id
	signed, err := t.SignedString(signer.private)
	if err != nil {
		return "", fmt.Errorf("sign an entry token: %w", err)
	}
	return signed, nil
}

var parser = jwt.NewParser(
	jwt.WithValidMethods([]string{jwt.SigningMethodEdDSA.Alg()}),
	jwt.WithStrictDecoding(),
	jwt.WithoutClaimsValidation(), // Redis decides whether a token has expired, by its own clock
)

// Verify returns the claims of a token that was signed by one of the keys, or an error that wraps
// ErrInvalid. It checks neither the expiry nor whether the token was given back: the caller asks
// Redis about both.
func (k *Keys) Verify(token string) (Claims, error) {
	if len(token) > maxTokenBytes {
		return Claims{}, fmt.Errorf("%w: it has %d bytes, at most %d are allowed",
			ErrInvalid, len(token), maxTokenBytes)
	}
	var p payload
	_, err := parser.ParseWithClaims(token, &p, k.keyOf)
	if err != nil {
		return Claims{}, fmt.Errorf("%w: %w", ErrInvalid, reason(err))
	}
	if field := p.missing(); field != "" {
		return Claims{}, fmt.Errorf("%w: the claim %s is missing", ErrInvalid, field)
	}
	return Claims{
		Issuer: p.Iss, Audience: p.Aud, User: p.Sub, Event: p.Evt, Fence: p.Jti,
		IssuedAt: time.Unix(p.Iat, 0), ExpiresAt: time.Unix(p.Exp, 0),
	}, nil
}

var errUnknownKey = errors.New("its key is not known")

// keyOf returns the public key with the id (kid) in the token's header, only from the keys of the
// file. It ignores headers such as jku, x5u and jwk, by which a forger could supply a key.
func (k *Keys) keyOf(t *jwt.Token) (any, error) {
	id, _ := t.Header["kid"].(string)
	if public := k.current.Load().byID[id]; public != nil {
		return public, nil
	}
	return nil, errUnknownKey
}

// reason converts an error of the JWT library to one that contains no part of the token, because
// errors are logged and shown.
func reason(err error) error {
	switch {
	case errors.Is(err, errUnknownKey):
		return errUnknownKey
	case errors.Is(err, jwt.ErrTokenMalformed):
		return jwt.ErrTokenMalformed
	case errors.Is(err, jwt.ErrTokenSignatureInvalid):
		return jwt.ErrTokenSignatureInvalid
	}
	return jwt.ErrTokenUnverifiable
}

// missing returns the name of a required claim that p lacks; "" if it has all of them.
func (p payload) missing() string {
	switch {
	case p.Iss == "":
		return "iss"
	case p.Aud == "":
		return "aud"
	case p.Sub == "":
		return "sub"
	case p.Evt == "":
		return "evt"
	case p.Jti == "":
		return "jti"
	case p.Iat <= 0:
		return "iat"
	case p.Exp <= 0:
		return "exp"
	}
	return ""
}
