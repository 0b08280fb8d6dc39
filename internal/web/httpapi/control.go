package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web"
)

// The limits of a tenant's settings.
const (
	maxTenantRPS    = 1e9
	minTenantWeight = 0.001
	maxTenantWeight = 1000
	maxBasePriority = 1_000_000_000_000_000
)

// pauseTenantOrType returns the handler that pauses or resumes a tenant or a type. root is the path
// of the collection; param is the path parameter with the id.
func (s *server) pauseTenantOrType(
	root, param string, paused bool, do func(context.Context, string) error,
) web.Handler {
	return commandOn(s, param, nil, func(ctx context.Context, id string, _ struct{}) (any, error) {
		links := map[string]string{"pause": root + id + "/pause", "resume": root + id + "/resume"}
		return api.Paused{ID: id, Paused: paused, Links: links}, do(ctx, id)
	})
}

func readWorkers(f *fields) *int64 { return f.upTo("workers", api.MaxWorkers) }

func resizeWorker(b Backend) func(context.Context, string, *int64) (any, error) {
	return func(ctx context.Context, id string, n *int64) (any, error) {
		if n == nil {
			return nil, invalidField("workers", "required")
		}
		return api.PoolSize{ID: id, Workers: int(*n)}, b.ResizeWorker(ctx, id, int(*n))
	}
}

// maxBusiest is how many of the busiest tenants an answer has if the request has no limit. No more
// of them are known in a partition.
const maxBusiest = 100

func (s *server) listTenants(r *http.Request) (l api.TenantList, err error) {
	cursor, limit, err := pageParams(r)
	if err != nil {
		return l, err
	}
	all, err := boolParam(r, "groups")
	if err != nil {
		return l, err
	}
	switch q := r.URL.Query(); q.Get("sort") {
	case "":
		l, err = s.Backend.Tenants(r.Context(), cursor, limit, all)
	case "backlog":
		for _, other := range []string{"cursor", "groups"} {
			if q.Has(other) {
				return l, invalidField(other, "can't be used with sort=backlog, which has one page of active tenants")
			}
		}
		if !q.Has("limit") {
			limit = maxBusiest
		}
		l, err = s.Backend.BusiestTenants(r.Context(), limit)
	default:
		return l, invalidField("sort", "must be backlog, or absent")
	}
	l.Tenants = orEmpty(l.Tenants)
	return l, err
}

const (
	jsonType       = "application/json"
	mergePatchType = "application/merge-patch+json"
)

// setTenant returns the function that carries out PUT /v1/tenants/{id}. A field that is absent or
// null gets its default.
func setTenant(b Backend) func(context.Context, string, api.TenantPatch) (api.Tenant, error) {
	return func(ctx context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
		set := api.TenantSettings{RPS: p.RPS.Value, Weight: p.Weight.Value, BasePriority: p.BasePriority.Value}
		return b.SetTenant(ctx, id, set)
	}
}

// changeTenant returns the function that decodes a tenant's settings from a body in one of these
// media types, calls do with them, and returns the tenant.
func changeTenant(
	s *server, do func(context.Context, string, api.TenantPatch) (api.Tenant, error), types ...string,
) func(*http.Request) (api.Tenant, error) {
	return func(r *http.Request) (t api.Tenant, err error) {
		id, err := pathID(r)
		if err != nil {
			return t, err
		}
		if _, err := mediaType(r, types...); err != nil {
			return t, err
		}
		body, release, err := s.readBody(r, smallBody)
		defer release()
		if err != nil {
			return t, err
		}
		patch, err := decodeSettings(body)
		if err != nil {
			return t, err
		}
		err = s.write(r.Context(), func(ctx context.Context) (err error) {
			t, err = do(ctx, id, patch)
			return err
		})
		return t, err
	}
}

// decodeSettings decodes the body of PUT and PATCH /v1/tenants/{id}. The error lists the bad
// fields, 100 at most.
func decodeSettings(body []byte) (api.TenantPatch, error) {
	var set api.TenantPatch
	if b := bytes.TrimSpace(body); len(b) == 0 || b[0] != '{' {
		return set, invalidField("body", `must be a JSON object such as {"rps": 50, "weight": 2}`)
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(body, &fields); err != nil {
		return set, malformedJSON(err)
	}
	if err := messages.RepeatedKey(body); err != nil {
		return set, err
	}
	problems := map[string]string{} // by field
	number := func(field, problem string, allowed func(float64) bool) (change api.Change[float64]) {
		v, given := fields[field]
		delete(fields, field)
		if !given {
			return change
		}
		change.Given = true
		if string(v) == "null" {
			return change
		}
		if change.Value = parseNumber(string(v)); change.Value == nil || !allowed(*change.Value) {
			problems[field] = "must be a " + problem
		}
		return change
	}
	set.RPS = number("rps", fmt.Sprintf("number above 0, to %d", int64(maxTenantRPS)),
		func(n float64) bool { return n > 0 && n <= maxTenantRPS })
	set.Weight = number("weight", fmt.Sprintf("number from %g to %d", minTenantWeight, maxTenantWeight),
		func(n float64) bool { return n >= minTenantWeight && n <= maxTenantWeight })
	base := number("base_priority", fmt.Sprintf("whole number from -%d to %[1]d", int64(maxBasePriority)),
		func(n float64) bool { return n == math.Trunc(n) && math.Abs(n) <= maxBasePriority })
	set.BasePriority.Given = base.Given
	if base.Value != nil {
		whole := int64(*base.Value)
		set.BasePriority.Value = &whole
	}
	for field := range fields {
		problems[field] = "not a known field; known are base_priority, rps and weight"
	}
	if len(problems) == 0 {
		return set, nil
	}
	const listed = 100
	bad := &messages.ValidationError{More: max(0, len(problems)-listed)}
	for _, field := range slices.Sorted(maps.Keys(problems))[:len(problems)-bad.More] {
		bad.Fields = append(bad.Fields, messages.FieldError{Field: truncate(field), Problem: problems[field]})
	}
	return api.TenantPatch{}, bad
}

// parseNumber parses a JSON number. It returns nil for anything else.
func parseNumber(v string) *float64 {
	if c := v[0]; c != '-' && (c < '0' || c > '9') {
		return nil
	}
	x, err := strconv.ParseFloat(v, 64)
	if err != nil {
		return nil
	}
	return &x
}

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
