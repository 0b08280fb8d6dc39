package main

import (
	"bytes"
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"html/template"
	"log"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/entry"
)

type config struct {
	broker, api     string // addresses of the waiting room and of the API
	event, audience string
	keyFile         string // "": the API asks for no key
	online          bool
}

// shop sells tickets of one event.
type shop struct {
	event    string
	secure   bool // the shop is reached by https, as the waiting room is
	verifier *entry.Verifier
	room     *entry.Client
	orders   orders
}

func newShop(ctx context.Context, c config) (*shop, error) {
	s := &shop{event: c.event, secure: strings.HasPrefix(c.broker, "https:")}
	toAPI, err := apiClient(c)
	if err != nil {
		return nil, err
	}
	if s.room, err = entry.NewClient(c.api, toAPI); err != nil {
		return nil, err
	}
	s.verifier, err = entry.New(ctx, entry.Config{
		PublicURL: c.broker, Event: c.event, Audience: c.audience,
		Leeway: 2 * time.Second,
		Online: c.online, APIURL: c.api, HTTPClient: toAPI,
		Refused: http.HandlerFunc(s.refused),
	})
	return s, err
}

// keySender is an http.RoundTripper. It adds the API key to requests to the API's host, and to no
// others.
type keySender struct{ host, key string }

func (k keySender) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host == k.host {
		r = r.Clone(r.Context()) // a RoundTripper must not change its request
		r.Header.Set("Authorization", "Bearer "+k.key)
	}
	return http.DefaultTransport.RoundTrip(r)
}

// apiClient returns an HTTP client that sends the shop's API key to the API; nil if the shop has no
// key.
func apiClient(c config) (*http.Client, error) {
	if c.keyFile == "" {
		return nil, nil
	}
	key, err := os.ReadFile(c.keyFile)
	if err != nil {
		return nil, err
	}
	api, err := url.Parse(c.api)
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Transport: keySender{host: api.Host, key: strings.TrimSpace(string(key))}, Timeout: 3 * time.Second,
	}, nil
}

func (s *shop) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.home)
	mux.HandleFunc("GET /style.css", style)
	mux.HandleFunc("GET /orders/{number}", s.order)
	// The middleware redirects a GET without a valid entry token to the waiting page. From there,
	// users come back when they have a token.
	behind := func(h http.HandlerFunc) http.Handler { return s.verifier.Middleware(h) }
	mux.Handle("GET /buy", behind(s.offer))
	mux.Handle("POST /buy", behind(s.buy))
	mux.Handle("POST /leave", behind(s.leave))
	mux.Handle("POST /renew", behind(s.renew))
	return http.NewCrossOriginProtection().Handler(mux) // no other site's page can buy or leave
}

func (s *shop) home(w http.ResponseWriter, _ *http.Request) {
	s.page(w, http.StatusOK, "home", nil)
}

// offer is what users wait for.
func (s *shop) offer(w http.ResponseWriter, r *http.Request) {
	claims, _ := entry.FromContext(r.Context())
	s.page(w, http.StatusOK, "offer", claims.ExpiresAt.UTC())
}

// buy sells one ticket. Complete, which gives the slot back, returns true only once for each entry
// token, so a user who presses the button twice buys once.
func (s *shop) buy(w http.ResponseWriter, r *http.Request) {
	claims, _ := entry.FromContext(r.Context())
	number := s.orders.open(claims.Fence)
	done, err := s.room.Complete(r.Context(), entry.Token(r.Context()), true)
	if err != nil {
		s.unavailable(w, err)
		return
	}
	if done {
		s.orders.confirm(number)
	}
	s.end(w, r, "/orders/"+number)
}

// leave gives the slot to the next user.
func (s *shop) leave(w http.ResponseWriter, r *http.Request) {
	if _, err := s.room.Complete(r.Context(), entry.Token(r.Context()), false); err != nil {
		s.unavailable(w, err)
		return
	}
	s.end(w, r, "/")
}

// renew gets the user a token that is valid for longer, if the waiting room allows that.
func (s *shop) renew(w http.ResponseWriter, r *http.Request) {
	renewed, err := s.room.Renew(r.Context(), entry.Token(r.Context()))
	switch {
	case errors.Is(err, entry.ErrOver):
		claims, _ := entry.FromContext(r.Context())
		s.page(w, http.StatusConflict, "over", claims.ExpiresAt.UTC())
	case err != nil:
		s.unavailable(w, err)
	default:
		http.SetCookie(w, entry.Cookie(s.event, renewed, s.secure))
		http.Redirect(w, r, "/buy", http.StatusSeeOther)
	}
}

// end removes the cookie with the entry token, which verifies offline until it expires, and
// redirects the user to another page.
func (s *shop) end(w http.ResponseWriter, r *http.Request, path string) {
	http.SetCookie(w, entry.RemovedCookie(s.event, s.secure))
	http.Redirect(w, r, path, http.StatusSeeOther)
}

func (s *shop) order(w http.ResponseWriter, r *http.Request) {
	number := r.PathValue("number")
	switch confirmed, known := s.orders.state(number); {
	case !known:
		s.page(w, http.StatusNotFound, "unknown", nil)
	case confirmed:
		s.page(w, http.StatusOK, "bought", number)
	default:
		s.page(w, http.StatusOK, "unconfirmed", number)
	}
}

// refused answers requests without a valid token that are not redirected to the waiting page, such
// as a form that was sent after the token had expired.
func (s *shop) refused(w http.ResponseWriter, r *http.Request) {
	name := "refused"
	if _, err := r.Cookie(entry.CookieName(s.event)); err != nil && r.Header.Get("Authorization") == "" {
		name = "early"
	}
	s.page(w, http.StatusForbidden, name, nil)
}

func (s *shop) unavailable(w http.ResponseWriter, err error) {
	log.Print(err)
	w.Header().Set("Retry-After", "2")
	s.page(w, http.StatusServiceUnavailable, "unavailable", nil)
}

// orders are kept in memory. Their numbers can't be guessed.
type orders struct {
	mu        sync.Mutex
	byFence   map[string]string // number of the order that belongs to an entry
	confirmed map[string]bool   // by number
}

// open returns the number of the order that belongs to the entry with this fence. The first call
// creates it.
func (o *orders) open(fence string) (number string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byFence == nil {
		o.byFence, o.confirmed = map[string]string{}, map[string]bool{}
	}
	if o.byFence[fence] == "" {
		o.byFence[fence] = rand.Text()
		o.confirmed[o.byFence[fence]] = false
	}
	return o.byFence[fence]
}

func (o *orders) confirm(number string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.confirmed[number] = true
}

func (o *orders) state(number string) (confirmed, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	confirmed, known = o.confirmed[number]
	return confirmed, known
}

var (
	//go:embed pages.html
	pagesText string
	//go:embed style.css
	styleText []byte

	pages = template.Must(template.New("").Parse(pagesText))
)

func (s *shop) page(w http.ResponseWriter, status int, name string, value any) {
	var page bytes.Buffer
	data := map[string]any{"Event": s.event, "Wait": s.verifier.WaitURL(), "Value": value}
	if err := pages.ExecuteTemplate(&page, name, data); err != nil {
		log.Print(err)
		http.Error(w, "the page can't be shown", http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy",
		"default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(page.Bytes()) // an error means that the client has left
}

func style(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/css; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(styleText)
}
