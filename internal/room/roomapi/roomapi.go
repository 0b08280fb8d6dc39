// Package roomapi serves the visitors of the waiting room over HTTP: streams of events (SSE),
// polls, tokens, the state of events and the default waiting page. It hides who a visitor is (a
// signed cookie, or a header of a proxy), which requests may enter a user, the limits per IP, and
// how frames reach slow and fast readers. A [Room] knows the queue.
package roomapi

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
)

// MaxHeaderBytes is the limit of a request's headers that the HTTP server should be given: the
// cookies of a whole host fit, and 64 KiB of them are refused with 431.
const MaxHeaderBytes = 32 << 10

// answerTimeout is the most time to compute and write an answer that is not a stream.
const answerTimeout = time.Minute

// Errors of a Room. The API shows its own texts.
var (
	ErrUnknownEvent = errors.New("there is no such event")              // 404
	ErrNoTicket     = errors.New("the user has no ticket")              // 404
	ErrNotReady     = errors.New("the user has not been promoted yet")  // 409
	ErrClosed       = errors.New("the event is closed")                 // 409
	ErrSoldOut      = errors.New("the event is sold out")               // 410
	ErrFull         = errors.New("the queue is as long as it may be")   // 429
	ErrBusy         = errors.New("this broker can't take the user now") // 503
	ErrDraining     = errors.New("this broker is stopping")             // 503
)

// Room is what the API needs of a broker. Besides the errors above, its methods may return
// api.ErrUnavailable when Redis does not answer. event and user are valid ids.
type Room interface {
	// Connect enters the user if needed, and makes s the user's stream. From then on the broker
	// calls the methods of s, State first. ctx ends when the client has closed the connection. The
	// API calls left once, after the last frame was written or the client has gone. If Connect
	// returns an error, the broker must not use s afterwards.
	Connect(ctx context.Context, event, user string, s *Stream) (left func(), err error)
	// Poll returns the user's ticket. If the user has none, Poll creates one with enter set
	// (created is true), and returns ErrNoTicket otherwise. A Room always sets PollAfterMS; the API
	// fills in the ticket's field Stream.
	Poll(ctx context.Context, event, user string, enter bool) (t api.Ticket, created bool, err error)
	// Leave ends the user's ticket in any state. It returns no error if there is none.
	Leave(ctx context.Context, event, user string) error
	// Token returns the entry token of a user who is READY or IN_PROGRESS, the same one until it is
	// renewed, and the event's return_url. For a user in the queue it returns ErrNotReady.
	Token(ctx context.Context, event, user string) (t api.EntryToken, returnURL string, err error)
	// Status returns the state of an event that visitors may see. The API calls it at most once a
	// second per event, as long as visitors ask for fewer than 4,096 events.
	Status(ctx context.Context, event string) (api.EventStatus, error)
	// JWKS returns the public keys of tokens, as JSON.
	JWKS() []byte
}

// Options configure the API.
type Options struct {
	Room Room
	Log  *slog.Logger

	// PublicURL is the address under which visitors reach the API, without a slash at its end.
	PublicURL string
	// CookieKeys returns the HMAC keys of the visitors' cookies: the first one signs, all are
	// accepted.
	CookieKeys func() [][]byte
	// IdentityHeader is the header in which a proxy names the user; "": a signed cookie identifies
	// users.
	IdentityHeader string
	// TrustedProxies may set IdentityHeader and X-Forwarded-For.
	TrustedProxies []netip.Prefix

	Heartbeat    time.Duration // silence after which a stream gets a comment
	WriteTimeout time.Duration // longest time to write a frame

	MaxConnections      int // most open streams
	MaxConnectionsPerIP int
	EnterRatePerIP      int // new visitors a second

	Look    *Look // of the waiting page; nil: the standard one
	Metrics Metrics
}

// Metrics are functions that the API calls to count something.
type Metrics struct {
	// SlowReader counts a stream that was closed because its client did not read.
	SlowReader func(event string)
	// Refused counts a refused request to enter. reason is unknown_event, closed, sold_out, full,
	// busy, draining, redis_away, rate, connections, cross_site or identity. event is "" if it is
	// not known to exist.
	Refused func(event, reason string)
	// Served records a request that has ended; status 0: nothing was answered. nil: none are recorded.
	Served func(r *http.Request, status int, took time.Duration)
}

// API is the handler of all requests. Make it with New.
type API struct {
	room      Room
	log       *slog.Logger
	mux       *http.ServeMux
	csrf      http.CrossOriginProtection
	publicURL string
	origin    string // scheme and host of the public URL
	metrics   Metrics

	identity identity
	clients  *clients
	statuses *statuses
	page     *page
	streams  web.Streams
}

// New returns the API.
func New(o Options) *API {
	a := &API{
		room: o.Room, log: o.Log, mux: http.NewServeMux(), metrics: o.Metrics,
		publicURL: strings.TrimSuffix(o.PublicURL, "/"),
		clients:   newClients(o.TrustedProxies, o.MaxConnections, o.MaxConnectionsPerIP, o.EnterRatePerIP),
		statuses:  newStatuses(o.Room.Status),
		streams: web.Streams{
			Max: math.MaxInt64, WriteTimeout: o.WriteTimeout, KeepAlive: o.Heartbeat, // clients has the limits
			MinRetry: shortestRetry, MaxRetry: longestRetry,
		},
	}
	base, secure := "", false
	if u, err := url.Parse(a.publicURL); err == nil { // the configuration has checked it
		base, a.origin, secure = u.EscapedPath(), u.Scheme+"://"+u.Host, u.Scheme == "https"
		_ = a.csrf.AddTrustedOrigin(a.origin) // fails only for what is no origin
	}
	a.identity = identity{keys: o.CookieKeys, header: o.IdentityHeader, secure: secure}
	if o.Look == nil {
		o.Look = standardLook()
	}
	a.page = newPage(base, o.Look)
	a.routes().Register(a.mux, a.fail)
	return a
}

func (a *API) routes() web.Routes {
	const event = "/events/{event}"
	t := web.Routes{}
	t.Add(http.MethodGet, event, false, a.getStatus)
	t.Add(http.MethodGet, event+"/tickets/waiting", true, a.stream)
	t.Add(http.MethodPost, event+"/ticket", false, a.enterTicket)
	t.Add(http.MethodGet, event+"/ticket", false, a.getTicket)
	t.Add(http.MethodDelete, event+"/ticket", false, a.leave)
	t.Add(http.MethodPost, event+"/ticket/leave", false, a.leave)
	t.Add(http.MethodPost, event+"/ticket/token", false, a.token)
	t.Add(http.MethodGet, event+"/wait", false, a.wait)
	t.Add(http.MethodGet, "/.well-known/jwks.json", false, a.jwks)
	t.Add(http.MethodGet, "/openapi.yaml", false, getOpenAPI)
	for path, file := range a.page.assets {
		t.Add(http.MethodGet, path, false, file.serve)
	}
	return t
}

// ServeHTTP serves one request.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer a.logPanic(r)
	ctl := http.NewResponseController(w)
	now := time.Now()
	// Ignore the error: the server of a test may not support deadlines. Streams set a deadline for
	// each frame.
	_ = ctl.SetWriteDeadline(now.Add(answerTimeout))
	if r.ContentLength != 0 { // net/http reads the body to its end: not for longer than this
		_ = ctl.SetReadDeadline(now.Add(bodyTimeout))
	}
	h := w.Header()
	h["Cache-Control"] = noStore
	h["X-Content-Type-Options"] = noSniff
	if a.metrics.Served == nil {
		a.mux.ServeHTTP(w, r)
		return
	}
	answer := &answer{ResponseWriter: w}
	defer func() { a.metrics.Served(r, answer.status, time.Since(now)) }()
	a.mux.ServeHTTP(answer, r)
}

// answer remembers the status of an answer.
type answer struct {
	http.ResponseWriter
	status int
}

func (a *answer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
	}
	a.ResponseWriter.WriteHeader(status)
}

func (a *answer) Write(p []byte) (int, error) {
	if a.status == 0 {
		a.status = http.StatusOK
	}
	return a.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController find the wrapped writer.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// bodyTimeout is the most time to read a request's body. No call needs a body.
const bodyTimeout = 5 * time.Second

// Header values that all answers share, so that they need no allocation. They are never changed.
var (
	noStore = []string{"no-store"}
	noSniff = []string{"nosniff"}
)
