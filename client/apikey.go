package client

import (
	"net/http"
	"net/url"
	"strings"
)

// WithAPIKey makes the API send key with each request, as Authorization: Bearer. The key is sent to
// the scheme, host and port of the base URL only: a request that is redirected elsewhere goes there
// without it. The key appears in no error.
func WithAPIKey(key string) Option {
	return func(a *API) { a.key = key }
}

// keySender is an http.RoundTripper that adds the API key. The http.Client that uses it never sees
// the key, so it can't send the key to the target of a redirect, as net/http does for another port
// of the same host and from https to http.
type keySender struct {
	next   http.RoundTripper // nil: http.DefaultTransport
	origin string
	key    string
}

func (k keySender) RoundTrip(r *http.Request) (*http.Response, error) {
	if originOf(r.URL) == k.origin {
		r = r.Clone(r.Context()) // a RoundTripper must not change its request
		r.Header.Set("Authorization", "Bearer "+k.key)
	}
	if k.next == nil {
		return http.DefaultTransport.RoundTrip(r)
	}
	return k.next.RoundTrip(r)
}

// originOf returns the scheme, host and port of a URL.
func originOf(u *url.URL) string {
	scheme, port := strings.ToLower(u.Scheme), u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[scheme]
	}
	return scheme + "://" + strings.ToLower(u.Hostname()) + ":" + port
}

// sendKey makes both clients send the key.
func (t *transport) sendKey() {
	base, err := url.Parse(t.base)
	if err != nil {
		return // checkBase makes each call fail
	}
	for _, c := range []*http.Client{t.unary, t.stream} {
		c.Transport = keySender{next: c.Transport, origin: originOf(base), key: t.key}
	}
}
