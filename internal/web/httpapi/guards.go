package httpapi

import (
	"context"
	"net/http"
	"slices"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/web"
)

const (
	guardProblem = "must be NAME or KIND/NAME, with the slash escaped as %2F, where KIND is pool, breaker, lock, " +
		"semaphore or key (key/NAME/KEY), and the others match ^[A-Za-z0-9._-]{1,128}$"
	kindProblem = "must be pool, breaker, lock, semaphore or key"
)

// guardName parses the name of the guard in the path, and returns it as KIND/NAME.
func guardName(r *http.Request) (string, error) {
	kind, rest, ok := guard.ParseName(r.PathValue("name"))
	if !ok {
		return "", badName("name", guardProblem)
	}
	return kind + "/" + rest, nil
}

// badName returns the problem for a path in which the parameter field is no valid name.
func badName(field, problem string) error {
	return web.NewProblem(api.BadParameter, field+": "+problem, api.FieldError{Field: field, Problem: problem})
}

func listGuards(b Backend) func(*http.Request) (api.GuardList, error) {
	return func(r *http.Request) (l api.GuardList, err error) {
		q := guard.Query{Kind: r.URL.Query().Get("kind")}
		if q.Cursor, q.Limit, err = pageParams(r); err != nil {
			return l, err
		}
		if q.Kind != "" && !slices.Contains(guard.Kinds, q.Kind) {
			return l, invalidField("kind", kindProblem)
		}
		l, err = b.Guards(r.Context(), q)
		l.Guards = orEmpty(l.Guards)
		for i := range l.Guards {
			l.Guards[i].Counters = orEmptyMap(l.Guards[i].Counters)
		}
		return l, err
	}
}

func getGuard(b Backend) func(*http.Request) (api.Guard, error) {
	return func(r *http.Request) (v api.Guard, err error) {
		name, err := guardName(r)
		if err != nil {
			return v, err
		}
		v, err = b.Guard(r.Context(), name)
		v.Members, v.Counters = orEmpty(v.Members), orEmptyMap(v.Counters)
		return v, err
	}
}

// controlGuard returns the handler of an operator's action on a member of a guard. The action runs
// to its end even if the client disconnects.
func controlGuard(s *server, do guard.Action) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		name, err := guardName(r)
		if err != nil {
			return err
		}
		member := r.PathValue("id")
		if !api.ValidID(member) {
			return badName("id", idProblem)
		}
		if err := noFields(s, r); err != nil {
			return err
		}
		err = s.write(r.Context(), func(ctx context.Context) error {
			return s.Backend.ControlGuard(ctx, name, member, do)
		})
		if err != nil {
			return err
		}
		accept(w, api.GuardAction{Guard: name, Member: member, Action: string(do)})
		return nil
	}
}
