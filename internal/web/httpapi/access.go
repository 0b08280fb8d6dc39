package httpapi

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/web"
)

// Keys checks API keys. Package apikey implements it.
type Keys interface {
	// Authenticate returns the principal of the API key with this token. client is the caller's
	// address, for which wrong tokens are counted. The errors are those of package apikey.
	Authenticate(ctx context.Context, token string, client netip.Addr) (auth.Principal, error)
	// Still reports whether a principal that Authenticate has returned is still valid: its key is
	// not revoked, has not expired, and has the same rights.
	Still(p auth.Principal) bool
}

type route struct {
	method, path string
	scope        auth.Scope // what the principal must be allowed to do; see open
	object       object     // which data of tenants the call is about
	serve        web.Handler
	stream       bool     // the answer or the body has no known end: no HEAD, and the key is checked again
	query        []string // the query parameters; a request with another one is refused
}

// open is the scope of calls that need no key.
const open auth.Scope = "open"

// object says, for each route, whose data the calls are about. The store decides whether this
// object exists for the caller.
type object string

const (
	noTenant        object = "none"               // what belongs to no tenant
	groupInPath     object = "group"              // the group {id}
	tenantInPath    object = "tenant"             // the tenant {id}
	tenantInBody    object = "tenant in the body" // the tenant of a new group or operation
	ownInList       object = "list"               // the list has what the caller may see
	operationInPath object = "operation"          // the operation {id}
	callbackInPath  object = "callback"           // the callback {callback}, and so its group
)

// authorized wraps the handler of a route: it calls serve only for callers with the route's scope
// who keep to the limits of callers, with the principal in the context. If the API has no keys,
// every caller may do everything. An open route serves all callers.
func (s *server) authorized(rt route, serve web.Handler) web.Handler {
	switch rt.scope {
	case "":
		panic(fmt.Sprintf("route %s %s has no scope", rt.method, rt.path))
	case open:
		return serve
	}
	if rt.object == "" {
		panic(fmt.Sprintf("route %s %s has no object", rt.method, rt.path))
	}
	if s.Keys == nil {
		return func(w http.ResponseWriter, r *http.Request) error {
			return serve(w, r.WithContext(s.withActor(auth.Trust(r.Context()), w, r, auth.Principal{})))
		}
	}
	return func(w http.ResponseWriter, r *http.Request) error {
		p, err := authenticate(s, r)
		if err != nil {
			return err
		}
		answer := w.(*responseWriter)
		answer.keyID = p.KeyID
		if err := s.callers.request(p, time.Now()); err != nil {
			return err
		}
		if !p.May(rt.scope) {
			s.Metrics.AuthFailed(telemetry.AuthRole)
			return web.NewProblem(api.NotAllowed,
				"needs "+auth.WhoMay(rt.scope)+"; this one is "+string(p.Role)+ofTenant(p))
		}
		ctx := s.withActor(auth.With(r.Context(), p), w, r, p)
		if rt.stream {
			var interrupted http.ResponseWriter // not that of an append, which still gets an answer
			if r.Method == http.MethodGet {
				end, err := s.callers.begin(p.KeyID, streamKind)
				if err != nil {
					return err
				}
				defer end()
				interrupted = w
			}
			var end func()
			ctx, end = web.WhileValid(ctx, interrupted, stillInterval, errKeyEnded, func() bool { return s.Keys.Still(p) })
			defer end()
		}
		return serve(w, r.WithContext(ctx))
	}
}

func ofTenant(p auth.Principal) string {
	if p.Tenant == "" {
		return ""
	}
	return " of " + p.Tenant
}

// authenticate returns the principal of a request's API key. A request without a key does not count
// towards the limit of failed authentications, because it is no attempt to guess a key.
func authenticate(s *server, r *http.Request) (auth.Principal, error) {
	token, ok := auth.Bearer(r.Header)
	if !ok {
		s.Metrics.AuthFailed(telemetry.AuthMissing)
		return auth.Principal{}, web.NewProblem(api.Unauthenticated,
			"this call needs an API key in the header Authorization, as in: Bearer bkp_…")
	}
	p, err := s.Authenticate(r, token)
	var many *apikey.TooManyFailuresError
	switch {
	case errors.As(err, &many):
		err = web.RetryLater(api.TooManyFailures, many.RetryAfter, err.Error())
	case errors.Is(err, apikey.ErrInvalid):
		err = web.NewProblem(api.Unauthenticated, err.Error())
	case errors.Is(err, apikey.ErrUnavailable):
		err = web.RetryLater(api.StoreUnavailable, time.Second, err.Error())
	}
	return p, err
}

// Authenticate returns the principal of an API key, as Keys does, and counts failures.
func (s Shared) Authenticate(r *http.Request, token string) (auth.Principal, error) {
	p, err := s.Keys.Authenticate(r.Context(), token, s.Proxies.ClientOf(r))
	var many *apikey.TooManyFailuresError
	switch {
	case errors.As(err, &many):
		s.Metrics.AuthFailed(telemetry.AuthTooMany)
	case errors.Is(err, apikey.ErrExpired):
		s.Metrics.AuthFailed(telemetry.AuthExpired)
	case errors.Is(err, apikey.ErrInvalid):
		s.Metrics.AuthFailed(telemetry.AuthUnknown)
	}
	return p, err
}

// withActor returns a context with the caller, whom the activity log names in entries of changes.
// Read requests get their context unchanged.
func (s *server) withActor(
	ctx context.Context, w http.ResponseWriter, r *http.Request, p auth.Principal,
) context.Context {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return ctx
	}
	actor := api.Activity{
		Actor: p.KeyID, Role: string(p.Role), Via: api.ViaAPI, RequestID: w.Header().Get("X-Request-Id"),
		Tenant: p.Tenant,
	}
	if ip := s.Proxies.ClientOf(r); ip.IsValid() {
		actor.IP = ip.String()
	}
	return activity.WithActor(ctx, actor)
}

// stillInterval is how often the key of an open stream is checked. Processes copy the keys from
// Redis each 5 s, and a copy is seven seconds old at most unless Redis is slow or away, so a stream
// ends within ten seconds of the revocation.
const stillInterval = 2 * time.Second

// errKeyEnded is the cause with which the context of a stream ends if the API key is not valid any
// more.
var errKeyEnded = web.NewProblem(api.Unauthenticated, "the API key is no longer valid")

// keyEnded returns errKeyEnded if ctx ended because the API key is no longer valid, and nil
// otherwise.
func keyEnded(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), errKeyEnded) {
		return errKeyEnded
	}
	return nil
}

//go:embed openapi.yaml
var openapiDocument []byte

// OpenAPI returns the OpenAPI document of the API.
func OpenAPI() []byte { return bytes.Clone(openapiDocument) }

// Scopes returns the scope of each call of the API that needs a key, by its method and path, as in
// "GET /v1/groups/{id}".
func Scopes() map[string]auth.Scope {
	// These nil stores are never called. With them, newServer registers the routes of all options.
	o := Options{Backend: struct{ Backend }{}, Rooms: struct{ Rooms }{}, Activity: struct{ Activity }{}}
	scopes := map[string]auth.Scope{}
	for _, rt := range newServer(o).routes() {
		if rt.scope != open {
			scopes[rt.method+" "+rt.path] = rt.scope
		}
	}
	return scopes
}

func getOpenAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/yaml")
	_, err := w.Write(openapiDocument)
	return err
}

// What one caller may have open at the same time.
const (
	maxAppends    = 64  // bodies of jobs
	maxKeyStreams = 500 // answers that are streams: events, results and failures
)

// kind is a kind of requests that may take any time.
type kind struct {
	most    int    // how many of them a caller may have open
	problem string // what a caller with most of them is told
}

var (
	appendKind = kind{maxAppends, "%d bodies of jobs are being sent by you already: end one, or send more jobs in each"}
	streamKind = kind{maxKeyStreams, "your API key has %d streams of events, results and failures already: end one"}
)

// callers limits the requests of each caller to this server, so that no caller can occupy its
// connections or CPU. A caller is an API key or, for an API without keys, a client's address; the
// rate of requests is limited only for keys.
type callers struct {
	perSecond int // requests that a key may make in a second, and at once; 0: any number

	mu    sync.Mutex
	open  map[opened]int           // requests
	rates map[string]*rate.Limiter // by key id; only keys that were valid get in
}

type opened struct {
	caller string
	kind   kind
}

func newCallers(perSecond int) *callers {
	return &callers{perSecond: perSecond, open: map[opened]int{}, rates: map[string]*rate.Limiter{}}
}

// maxRates: when this many rate limiters exist, those of idle keys are removed. There may be 10,000
// keys, and rotated keys are replaced by new ones.
const maxRates = 20_000

// request counts a request of an API key. It returns a problem if the key has made too many
// requests.
func (c *callers) request(p auth.Principal, now time.Time) error {
	if c.perSecond == 0 {
		return nil
	}
	c.mu.Lock()
	limiter := c.rates[p.KeyID]
	if limiter == nil {
		c.removeIdle(now)
		limiter = rate.NewLimiter(rate.Limit(c.perSecond), c.perSecond)
		c.rates[p.KeyID] = limiter
	}
	c.mu.Unlock()
	if wait := auth.TakeFrom(limiter, now); wait > 0 {
		return web.RetryLater(api.TooManyRequests, wait,
			fmt.Sprintf("your API key may make %d requests a second at this server", c.perSecond))
	}
	return nil
}

// removeIdle removes the limiters that have all their permits, if there are maxRates limiters. A
// removed limiter changes nothing: a new one would have all its permits, too.
func (c *callers) removeIdle(now time.Time) {
	if len(c.rates) < maxRates {
		return
	}
	for id, limiter := range c.rates {
		if limiter.TokensAt(now) >= float64(c.perSecond) {
			delete(c.rates, id)
		}
	}
}

// begin counts an open request of kind k for the caller until end is called. It returns a problem
// if the caller already has k.most open ones. A caller with the name "" is not counted.
func (c *callers) begin(caller string, k kind) (end func(), err error) {
	if caller == "" {
		return func() {}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	o := opened{caller, k}
	if c.open[o] >= k.most {
		return nil, web.RetryLater(api.TooManyStreams, tooManyRetry, fmt.Sprintf(k.problem, k.most))
	}
	c.open[o]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.open[o]--; c.open[o] == 0 {
			delete(c.open, o)
		}
	}, nil
}

// callerOf returns the name under which the limits count the caller of a request: the id of its API
// key or, if p is zero because the API has no keys, its address. It returns "" if a trusted proxy
// does not name the client.
func (s Shared) callerOf(r *http.Request, p auth.Principal) string {
	if p.KeyID != "" {
		return p.KeyID
	}
	if ip := s.Proxies.ClientOf(r); ip.IsValid() {
		return ip.String()
	}
	return ""
}
