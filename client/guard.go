package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strings"

	"github.com/bulkaction/bulkaction/api"
)

// guardAPI holds the calls on guards. A guard is named KIND/NAME; a NAME alone is that of a pool.
type guardAPI struct{ *transport }

// Guards iterates over the guards of a kind, or with "" over the guards of all kinds except key, in
// no order. A guard may come twice, and one made meanwhile not at all. An error ends the iteration.
func (a *guardAPI) Guards(ctx context.Context, kind string) iter.Seq2[api.GuardSummary, error] {
	query := url.Values{"limit": {"1000"}}
	if kind != "" {
		query.Set("kind", kind)
	}
	return pages(ctx, a.transport, "guards", query,
		func(l api.GuardList) ([]api.GuardSummary, string) { return l.Guards, l.Cursor })
}

// Guard returns a guard with all its members.
func (a *guardAPI) Guard(ctx context.Context, name string) (api.Guard, error) {
	return doJSON[api.Guard](ctx, a.transport, guardCall("get", http.MethodGet, name, ""))
}

// ControlGuard carries out an action on one member of a guard. action is disable (no new lease),
// enable, open or close (its circuit breaker), or take-back (its leases). A guard that is not a
// pool has one member, "1". The call may be repeated, as the client does itself; then open begins
// the breaker's time again, and take-back also ends leases that were granted since.
func (a *guardAPI) ControlGuard(ctx context.Context, name, member, action string) (api.GuardAction, error) {
	c := guardCall(action+" member "+member+" of", http.MethodPost, name, "/members/"+member+"/"+action)
	switch {
	case c.invalid != nil:
	case !api.ValidID(member):
		c.invalid = fmt.Errorf("member id %q: must "+api.IDRule, member)
	case !api.ValidID(action):
		c.invalid = fmt.Errorf("action %q: must be disable, enable, open, close or take-back", action)
	}
	return doJSON[api.GuardAction](ctx, a.transport, c)
}

// guardCall returns a call on one guard. name is NAME, KIND/NAME or key/NAME/KEY, and is one
// segment of the path; rest follows it. A name with a part that is no valid id makes the call
// invalid; whether there is such a KIND is for the server to say.
func guardCall(verb, method, name, rest string) apiCall {
	c := apiCall{
		action: verb + " guard " + name, method: method, path: "/v1/guards/" + url.PathEscape(name) + rest,
	}
	for part := range strings.SplitSeq(name, "/") {
		if !api.ValidID(part) {
			c.invalid = fmt.Errorf("guard %q: must be NAME or KIND/NAME, where KIND is pool, breaker, lock, semaphore "+
				"or key (key/NAME/KEY)", name)
		}
	}
	return c
}
