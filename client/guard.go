package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
)

// guardAPI holds the calls on guards. A guard is named KIND/NAME; a NAME alone is that of a pool.
type guardAPI struct{ *transport }

// Guards iterates over the guards of a kind, or with "" over those of all kinds but key, in no
// order. A guard that is used meanwhile may come twice. An error ends the iteration.
func (a *guardAPI) Guards(ctx context.Context, kind string) iter.Seq2[guard.Summary, error] {
	query := url.Values{"limit": {"1000"}}
	if kind != "" {
		query.Set("kind", kind)
	}
	return pages(ctx, a.transport, "guards", query,
		func(l guard.List) ([]guard.Summary, string) { return l.Guards, l.Cursor })
}

// Guard returns a guard with all its members.
func (a *guardAPI) Guard(ctx context.Context, name string) (guard.View, error) {
	return doJSON[guard.View](ctx, a.transport, guardCall("get", http.MethodGet, name, ""))
}

// ControlGuard disables or enables a member of a guard, opens or closes its circuit breaker, or
// takes its leases back. A guard that is not a pool has one member, "1". The call may be repeated.
func (a *guardAPI) ControlGuard(
	ctx context.Context, name, member string, do guard.Action,
) (api.GuardAction, error) {
	c := guardCall(string(do)+" member "+member+" of", http.MethodPost, name, "/members/"+member+"/"+string(do))
	if !api.ValidID(member) && c.invalid == nil {
		c.invalid = fmt.Errorf("member id %q: must "+api.IDRule, member)
	}
	return doJSON[api.GuardAction](ctx, a.transport, c)
}

// guardCall returns a call on one guard. rest follows its name in the path. An invalid name makes
// the call invalid.
func guardCall(verb, method, name, rest string) apiCall {
	c := apiCall{
		action: verb + " guard " + name, method: method, path: "/v1/guards/" + url.PathEscape(name) + rest,
	}
	if _, _, ok := guard.ParseName(name); !ok {
		c.invalid = fmt.Errorf("guard %q: must be NAME or KIND/NAME, where KIND is pool, breaker, lock, semaphore or "+
			"key (key/NAME/KEY)", name)
	}
	return c
}
