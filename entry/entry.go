// Package entry protects a service behind the waiting room: it lets requests with a valid entry
// token through, sends browsers without one to the waiting page, and refuses all other requests.
//
//	import "github.com/bulkaction/bulkaction/entry"
//
//	verifier, err := entry.New(ctx, entry.Config{
//		PublicURL: "https://tickets.example.com",
//		Event:     "spring-sale",
//	})
//	…
//	http.Handle("/buy", verifier.Middleware(shop))
//
// An entry token is a JWT that brokers sign with Ed25519. It is checked here, without a call, by
// the public keys that the brokers publish. So a token that was given back before it expired is
// still accepted; with Config.Online each request is checked against the waiting room, too.
//
// A service that is done with a user says so by Client.Complete, so that the next user gets the
// slot at once, and removes the cookie:
//
//	client, err := entry.NewClient("http://127.0.0.1:8080", nil)
//	…
//	done, err := client.Complete(r.Context(), entry.Token(r.Context()), true) // sold
//	…
//	http.SetCookie(w, entry.RemovedCookie("spring-sale", true))
//
// The package imports no other package of this module.
package entry

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

var (
	// ErrInvalid means that a token does not allow entry: it is forged, for another event, expired
	// or given back.
	ErrInvalid = errors.New("the entry token is not valid")
	// ErrExpired is ErrInvalid of a token whose time is over.
	ErrExpired = fmt.Errorf("%w: it has expired", ErrInvalid)
	// ErrUnavailable means that the waiting room could not be asked, so it is not known whether a
	// token is valid or a call had its effect. Try again in a moment.
	ErrUnavailable = errors.New("the waiting room is not available")
	// ErrOver means that a token can't be renewed: the session is as long as it may be, or the
	// user is gone.
	ErrOver = errors.New("the entry can't be extended")
)

// errMismatch marks the ErrInvalid of a token that a broker has signed, but for another issuer,
// event or audience than those of this Verifier's Config.
var errMismatch = errors.New("the configuration of the service and of the brokers may differ")

const (
	// MaxLeeway is the largest Config.Leeway. The waiting room holds a slot longer than its token
	// lives: by default for 10 s (the event's leeway). The other 5 s are for differences between
	// clocks.
	MaxLeeway = 5 * time.Second
	// maxTokenBytes is the length up to which a token is decoded.
	maxTokenBytes = 4096
)

// Config says which tokens a Verifier accepts.
type Config struct {
	// PublicURL is BULKACTION_BROKER_PUBLIC_URL, such as "https://tickets.example.com". Tokens
	// must name it as their issuer. The waiting page is below it.
	PublicURL string
	// Event is the event of the tokens.
	Event string
	// Audience is BULKACTION_BROKER_TOKEN_AUDIENCE; "": the event.
	Audience string
	// JWKSURL is the address of the public keys; "": PublicURL/.well-known/jwks.json. Keys that
	// come by plain HTTP are as safe as the network.
	JWKSURL string
	// Keys are the public keys, for a service that does not fetch them. With Keys, JWKSURL must be
	// empty.
	Keys []ed25519.PublicKey
	// Leeway is how long after its expiry a token is accepted, for a clock that is ahead: 0 to 5 s.
	Leeway time.Duration
	// Online checks each token against the waiting room at APIURL, the address of the API (role
	// ingest). Then a token is refused as soon as its slot was given back. When the API does not
	// answer, nobody is let in.
	Online bool
	APIURL string
	// Refused answers a request without a valid token that is not sent to the waiting page, such as
	// a form that was sent too late; nil: 403 with a page (see Middleware) or a problem document.
	Refused http.Handler
	// HTTPClient fetches the public keys and makes the online checks; nil: a client with a time
	// limit of 3 s. Redirects are not followed.
	HTTPClient *http.Client
	// Log gets a line when the public keys can't be fetched, and for each refused request; nil:
	// slog.Default. Most refusals have the level debug.
	Log *slog.Logger
}

// Claims are what a valid token says.
type Claims struct {
	User      string // the id of the user in the waiting room
	Event     string
	Fence     string // identifies this entry. It is never used twice in an event
	IssuedAt  time.Time
	ExpiresAt time.Time
}

// Verifier checks entry tokens of one event. It may be used by several goroutines, and starts none.
type Verifier struct {
	config Config
	parser *jwt.Parser
	keys   *keySource
	online *Client // nil: offline
	log    *slog.Logger

	nextWarning atomic.Int64 // the Unix time before which no refusal is a warning
}

// New returns a Verifier, and fetches the public keys unless Config.Keys has them. If they can't be
// fetched now, New logs that, and they are fetched when a token is checked, at most once a second.
func New(ctx context.Context, c Config) (*Verifier, error) {
	c.PublicURL = strings.TrimRight(c.PublicURL, "/")
	if c.Audience == "" {
		c.Audience = c.Event
	}
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("entry: %w", err)
	}
	v := &Verifier{config: c, log: c.Log, parser: jwt.NewParser(
		jwt.WithValidMethods([]string{jwt.SigningMethodEdDSA.Alg()}),
		jwt.WithStrictDecoding(),
		jwt.WithAudience(c.Audience),
		jwt.WithExpirationRequired(),
		jwt.WithLeeway(c.Leeway),
	)}
	if v.log == nil {
		v.log = slog.Default()
	}
	if c.Online {
		v.online = &Client{base: strings.TrimRight(c.APIURL, "/"), http: httpClient(c.HTTPClient)}
	}
	v.keys = newKeySource(c, v.log)
	v.keys.start(ctx)
	return v, nil
}

var eventID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

func (c Config) check() error {
	if err := checkURL("PublicURL", c.PublicURL); err != nil {
		return err
	}
	if !eventID.MatchString(c.Event) {
		return fmt.Errorf("field Event %q: must be 1 to 128 letters, digits, dots, underscores or dashes", c.Event)
	}
	if c.Leeway < 0 || c.Leeway > MaxLeeway {
		return fmt.Errorf("field Leeway %s: must be 0 to %s", c.Leeway, MaxLeeway)
	}
	if c.JWKSURL != "" {
		if len(c.Keys) > 0 {
			return errors.New("JWKSURL and Keys: only one of them may be given")
		}
		if err := checkURL("JWKSURL", c.JWKSURL); err != nil {
			return err
		}
	}
	for i, key := range c.Keys {
		if len(key) != ed25519.PublicKeySize {
			return fmt.Errorf("field Keys[%d]: an Ed25519 key has %d bytes, this one %d",
				i, ed25519.PublicKeySize, len(key))
		}
	}
	if c.Online {
		return checkURL("APIURL", c.APIURL)
	}
	return nil
}

// checkURL returns an error if the text is not an address to which paths can be added.
func checkURL(field, text string) error {
	if text == "" {
		return fmt.Errorf("%s is missing", field)
	}
	u, err := url.Parse(text)
	switch {
	case err != nil: // it repeats the text, which may contain a password
		return fmt.Errorf("%s is not a URL", field)
	case u.User != nil:
		return fmt.Errorf("%s must not contain a user or password", field)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.RawQuery != "", u.Fragment != "":
		return fmt.Errorf("%s %q: must be http(s)://host, with a path if needed", field, text)
	}
	return nil
}

type tokenClaims struct {
	jwt.RegisteredClaims
	Event string `json:"evt"`
}

// Verify returns the claims of a token that allows entry now. Otherwise it returns ErrInvalid; or
// another error, mostly ErrUnavailable, if that could not be found out.
func (v *Verifier) Verify(ctx context.Context, token string) (Claims, error) {
	if len(token) > maxTokenBytes {
		return Claims{}, fmt.Errorf("%w: it has %d bytes, at most %d are allowed",
			ErrInvalid, len(token), maxTokenBytes)
	}
	var t tokenClaims
	_, err := v.parser.ParseWithClaims(token, &t, func(unverified *jwt.Token) (any, error) {
		kid, _ := unverified.Header["kid"].(string)
		return v.keys.find(ctx, kid)
	})
	if err != nil {
		return Claims{}, reason(err)
	}
	switch {
	case strings.TrimRight(t.Issuer, "/") != v.config.PublicURL:
		return Claims{}, fmt.Errorf("%w: %w: its issuer is not PublicURL", ErrInvalid, errMismatch)
	case t.Event != v.config.Event:
		return Claims{}, fmt.Errorf("%w: %w: it is for another event", ErrInvalid, errMismatch)
	case t.Subject == "", t.ID == "":
		return Claims{}, fmt.Errorf("%w: it names no user or no fence", ErrInvalid)
	}
	if v.online != nil {
		valid, err := v.online.Verify(ctx, token)
		if err != nil {
			return Claims{}, err
		}
		if !valid {
			return Claims{}, fmt.Errorf("%w: it was given back", ErrInvalid)
		}
	}
	c := Claims{User: t.Subject, Event: t.Event, Fence: t.ID, ExpiresAt: t.ExpiresAt.Time}
	if t.IssuedAt != nil {
		c.IssuedAt = t.IssuedAt.Time
	}
	return c, nil
}

// reason converts an error of the JWT parser into an error of this package. The result shows no
// part of the token.
func reason(err error) error {
	if errors.Is(err, ErrUnavailable) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: the public keys could not be fetched", ErrUnavailable)
	}
	if errors.Is(err, jwt.ErrTokenExpired) {
		return ErrExpired
	}
	if errors.Is(err, jwt.ErrTokenInvalidAudience) {
		return fmt.Errorf("%w: %w: it is for another audience", ErrInvalid, errMismatch)
	}
	for _, known := range []error{
		errUnknownKey, jwt.ErrTokenMalformed, jwt.ErrTokenSignatureInvalid, jwt.ErrTokenRequiredClaimMissing,
		jwt.ErrTokenNotValidYet,
	} {
		if errors.Is(err, known) {
			return fmt.Errorf("%w: %w", ErrInvalid, known)
		}
	}
	return fmt.Errorf("%w: it can't be verified", ErrInvalid)
}

// WaitURL returns the address of the waiting page.
func (v *Verifier) WaitURL() string {
	return v.config.PublicURL + "/events/" + v.config.Event + "/wait"
}
