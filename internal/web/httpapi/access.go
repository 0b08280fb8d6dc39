package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
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
	noTenant     object = "none"               // what belongs to no tenant
	groupInPath  object = "group"              // the group {id}
	tenantInPath object = "tenant"             // the tenant {id}
	tenantInBody object = "tenant in the body" // the tenant of a new group
	ownInList    object = "list"               // the list has what the caller may see
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
			return web.NewProblem(api.NotAllowed,
				"needs "+auth.WhoMay(rt.scope)+"; this one is "+string(p.Role)+ofTenant(p))
		}
		ctx := s.withActor(auth.With(r.Context(), p), w, r, p)
		if rt.stream {
			if r.Method == http.MethodGet {
				end, err := s.callers.begin(p.KeyID, streamKind)
				if err != nil {
					return err
				}
				defer end()
			}
			var end func()
			ctx, end = whileValid(ctx, s.Keys, p, func() {
				if r.Method == http.MethodGet { // an append still gets an answer
					_ = answer.ctl.SetWriteDeadline(time.Unix(1, 0)) // test servers have no deadlines
				}
			})
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
		return auth.Principal{}, web.NewProblem(api.Unauthenticated,
			"this call needs an API key in the header Authorization, as in: Bearer bkp_…")
	}
	p, err := s.Keys.Authenticate(r.Context(), token, s.Proxies.ClientOf(r))
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

// errKeyEnded is the cause with which whileValid ends a context: the API key is not valid any more.
var errKeyEnded = web.NewProblem(api.Unauthenticated, "the API key is not valid any more")

// whileValid returns a context that ends with the cause errKeyEnded when the principal's API key is
// not valid any more, which it checks each stillInterval. Then it also calls interrupt, which ends
// a write to a client that does not read. The caller must call end.
func whileValid(
	ctx context.Context, keys Keys, p auth.Principal, interrupt func(),
) (_ context.Context, end func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var checks sync.WaitGroup
	checks.Go(func() {
		tick := time.NewTicker(stillInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if !keys.Still(p) {
					cancel(errKeyEnded)
					interrupt()
					return
				}
			}
		}
	})
	return ctx, func() {
		cancel(nil)
		checks.Wait()
	}
}

// keyEnded returns errKeyEnded if ctx ended because the API key is not valid any more, and nil
// otherwise.
func keyEnded(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), errKeyEnded) {
		return errKeyEnded
	}
	return nil
}
