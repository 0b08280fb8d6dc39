package roomapi

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"net/http"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// cookieLife is how long browsers keep a visitor's cookie. It is renewed when the visitor enters.
// The signature in it has no end: only the removal of its key ends it.
const cookieLife = 24 * time.Hour

// idBytes is the size of a visitor's random id.
const idBytes = 16

// identity finds out which visitor makes a request: by a signed cookie, or by a header of a trusted
// proxy.
type identity struct {
	keys   func() [][]byte // the first signs, all are accepted
	header string          // "": by cookie
	secure bool            // the public address is https
}

// visitor is the user of a request.
type visitor struct {
	id     string // "": unknown
	native bool   // by Authorization: a client without cookies
}

var (
	errBadBearer = newProblem(api.BadIdentity, "identity",
		"the visitor id in Authorization is not one of this waiting room: use the value of the cookie that it has set")
	errNoProxy = newProblem(api.Forbidden, "identity",
		"this waiting room is reached only by its proxy, which says who the user is")
	errNoUser = newProblem(api.BadIdentity, "identity", "the proxy does not say who the user is")
	errTwoIDs = newProblem(api.BadParameter, "identity",
		"the request names two users: the proxy must replace the header that says who the user is, not add to it")
	errBadID = newProblem(api.BadParameter, "identity", "the user's id, which the proxy sets, must "+api.IDRule)
)

// of returns the visitor of a request. trusted says that the request comes from a trusted proxy. A
// cookie with a wrong signature counts as no cookie, so its visitor gets a new one. A wrong bearer
// token in Authorization is an error: a client that sends one would ignore a new cookie.
func (i *identity) of(r *http.Request, trusted bool) (visitor, error) {
	if i.header != "" {
		id := r.Header.Get(i.header)
		switch {
		case !trusted:
			return visitor{}, errNoProxy
		case id == "":
			return visitor{}, errNoUser
		case len(r.Header.Values(i.header)) > 1: // one of them may be the visitor's own
			return visitor{}, errTwoIDs
		case !api.ValidID(id):
			return visitor{}, errBadID
		}
		return visitor{id: id}, nil
	}
	if scheme, value, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		id, ok := i.verify(strings.TrimSpace(value))
		if !ok {
			return visitor{}, errBadBearer
		}
		return visitor{id: id, native: true}, nil
	}
	// Look at all cookies of this name and take any valid one: another site below the same domain
	// may have set one, too.
	for _, c := range r.CookiesNamed(i.cookieName()) {
		if id, ok := i.verify(c.Value); ok {
			return visitor{id: id}, nil
		}
	}
	return visitor{}, nil
}

// newID returns a random id of 22 characters.
func newID() string {
	var b [idBytes]byte
	_, _ = rand.Read(b[:]) // never fails
	return base64.RawURLEncoding.EncodeToString(b[:])
}

func (i *identity) cookieName() string {
	if i.secure {
		return "__Host-broker" // browsers accept it only with Secure, Path=/ and without Domain
	}
	return "broker"
}

// cookie returns the cookie that makes a visitor known.
func (i *identity) cookie(id string) *http.Cookie {
	return &http.Cookie{
		Name: i.cookieName(), Value: id + "." + base64.RawURLEncoding.EncodeToString(mac(i.keys()[0], id)),
		Path: "/", MaxAge: int(cookieLife / time.Second),
		HttpOnly: true, Secure: i.secure, SameSite: http.SameSiteLaxMode,
	}
}

// verify checks the signature in a cookie's value by each of the keys, and returns the visitor's
// id; ok is false if no key has signed it.
func (i *identity) verify(value string) (id string, ok bool) {
	id, signature, _ := strings.Cut(value, ".")
	if len(id) != base64.RawURLEncoding.EncodedLen(idBytes) || !api.ValidID(id) {
		return "", false
	}
	got, err := base64.RawURLEncoding.Strict().DecodeString(signature)
	if err != nil {
		return "", false
	}
	for _, key := range i.keys() {
		if hmac.Equal(got, mac(key, id)) {
			return id, true
		}
	}
	return "", false
}

func mac(key []byte, id string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(id))
	return h.Sum(nil)
}

// entryCookie returns the cookie that carries an entry token to the protected service. Each event
// has a cookie of its own.
func (i *identity) entryCookie(event string, t api.EntryToken) *http.Cookie {
	// Set MaxAge besides Expires: browsers prefer it, and it does not depend on the visitor's
	// clock.
	rest := max(time.Until(t.ExpiresAt), time.Second)
	return &http.Cookie{
		Name: "entry." + event, Value: t.Token, Path: "/", Expires: t.ExpiresAt.UTC(), MaxAge: int(rest / time.Second),
		HttpOnly: true, Secure: i.secure, SameSite: http.SameSiteLaxMode,
	}
}

// forget returns the cookie that removes the entry token of a user who has left from the browser.
func (i *identity) forget(event string) *http.Cookie {
	c := i.entryCookie(event, api.EntryToken{})
	c.Expires, c.MaxAge = time.Time{}, -1
	return c
}

var (
	errCrossSite = newProblem(api.CrossSite, "cross_site",
		"a page of another site can't enter or leave for its visitors: open the waiting page")
	errPrefetch = newProblem(api.CrossSite, "cross_site", "a prefetch does not enter")
)

// checkChange refuses requests with a method other than GET and HEAD that a page of another origin
// makes (CSRF).
func (a *API) checkChange(r *http.Request) error {
	if a.csrf.Check(r) != nil {
		return errCrossSite
	}
	return nil
}

// checkEntry refuses requests that must not enter their user: a POST or DELETE from another origin,
// a HEAD, and a GET that another site causes, for example by a link or an image, or that only
// prefetches a page.
func (a *API) checkEntry(r *http.Request) error {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return a.checkChange(r)
	}
	if r.Method == http.MethodHead || isPrefetch(r.Header) {
		return errPrefetch
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "same-origin", "same-site", "none":
		return nil
	case "": // an old browser, or no browser
		if origin := r.Header.Get("Origin"); origin == "" || origin == a.origin {
			return nil
		}
	}
	return errCrossSite
}

// isPrefetch reports whether the browser loads a page in advance: its user may never look at it.
func isPrefetch(h http.Header) bool {
	for _, name := range []string{"Sec-Purpose", "Purpose", "X-Purpose", "X-Moz"} {
		v := strings.ToLower(h.Get(name))
		if strings.Contains(v, "prefetch") || strings.Contains(v, "prerender") || strings.Contains(v, "preview") {
			return true
		}
	}
	return false
}
