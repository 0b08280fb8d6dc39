package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
)

// The limits of settings.
const (
	maxRPS          = 1e9
	maxInFlight     = 1e6
	minTenantWeight = 0.001
	maxTenantWeight = 1000
	maxBasePriority = 1e15
	minBackoff      = time.Millisecond
	maxBackoff      = 24 * time.Hour
)

const (
	jsonType       = "application/json"
	mergePatchType = "application/merge-patch+json"
)

// patchTypes are the media types of a PATCH.
var patchTypes = []string{mergePatchType, jsonType}

// changed returns the function that decodes a body in one of these media types, calls do with the
// change and the id in the path parameter param ("": the path has none), and returns the changed
// object.
func changed[P, T any](
	s *server, param string, decode func([]byte) (P, error), do func(context.Context, string, P) (T, error),
	types ...string,
) func(*http.Request) (T, error) {
	return func(r *http.Request) (v T, err error) {
		var id string
		if param != "" {
			if id, err = pathValue(r, param); err != nil {
				return v, err
			}
		}
		if _, err := mediaType(r, types...); err != nil {
			return v, err
		}
		body, release, err := s.readBody(r, smallBody)
		defer release()
		if err != nil {
			return v, err
		}
		change, err := decode(body)
		if err != nil {
			return v, err
		}
		err = s.write(r.Context(), func(ctx context.Context) (err error) {
			v, err = do(ctx, id, change)
			return err
		})
		return v, err
	}
}

// setTenant returns the function that carries out PUT /v1/tenants/{id}. A field that is absent or
// null gets its default.
func setTenant(b Backend) func(context.Context, string, api.TenantPatch) (api.Tenant, error) {
	return func(ctx context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
		set := api.TenantSettings{RPS: p.RPS.Value, Weight: p.Weight.Value, BasePriority: p.BasePriority.Value, InFlight: p.InFlight.Value}
		return b.SetTenant(ctx, id, set)
	}
}

func patchLimits(b Backend) func(context.Context, string, api.LimitsPatch) (api.Limits, error) {
	return func(ctx context.Context, _ string, p api.LimitsPatch) (api.Limits, error) {
		return b.PatchLimits(ctx, p)
	}
}

func getLimits(b Backend) func(*http.Request) (api.Limits, error) {
	return func(r *http.Request) (api.Limits, error) {
		l, err := b.Limits(r.Context())
		return withEmptyParts(l), err
	}
}

// limitsHandler returns the handler of a change of limits. Its status is 202 if the change is not in
// effect in all partitions yet.
func limitsHandler(change func(*http.Request) (api.Limits, error)) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		l, err := change(r)
		if err != nil {
			return err
		}
		status := http.StatusOK
		if len(l.PendingPartitions) > 0 {
			status = http.StatusAccepted
		}
		web.WriteJSON(w, status, jsonType, withEmptyParts(l))
		return nil
	}
}

func withEmptyParts(l api.Limits) api.Limits {
	l.Types, l.ProcessesThatDiffer = orEmptyMap(l.Types), orEmpty(l.ProcessesThatDiffer)
	return l
}

// decodeSettings decodes the body of PUT and PATCH /v1/tenants/{id}. The error lists the bad
// fields, 100 at most.
func decodeSettings(body []byte) (set api.TenantPatch, err error) {
	f, err := parseFields(body)
	if err != nil {
		return set, err
	}
	set.RPS = change(f, "rps", fmt.Sprintf("must be a number above 0, to %d", int64(maxRPS)),
		numberIf(func(n float64) bool { return n > 0 && n <= maxRPS }))
	set.Weight = change(f, "weight", fmt.Sprintf("must be a number from %g to %d", minTenantWeight, maxTenantWeight),
		numberIf(func(n float64) bool { return n >= minTenantWeight && n <= maxTenantWeight }))
	set.BasePriority = wholeChange(f, "base_priority", -maxBasePriority, maxBasePriority)
	set.InFlight = wholeChange(f, "in_flight", 1, maxInFlight)
	if err := f.err(); err != nil {
		return api.TenantPatch{}, err
	}
	return set, nil
}

// decodeLimits decodes the body of PATCH /v1/limits.
func decodeLimits(body []byte) (p api.LimitsPatch, err error) {
	f, err := parseFields(body)
	if err != nil {
		return p, err
	}
	f.object("global", func(f *fields) {
		p.Global.RPS = wholeChange(f, "rps", 0, maxRPS)
		p.Global.Share = change(f, "share", "must be static or elastic", func(v json.RawMessage) (s string, ok bool) {
			err := json.Unmarshal(v, &s)
			return s, err == nil && (s == "static" || s == "elastic")
		})
		p.Global.DefaultBackoff = backoffChange(f, "default_backoff")
		p.Global.MaxBackoff = backoffChange(f, "max_backoff")
	})
	if err := f.err(); err != nil {
		return api.LimitsPatch{}, err
	}
	if p == (api.LimitsPatch{}) {
		return p, invalidField("global", `nothing to change: give at least one of rps, share, default_backoff and `+
			`max_backoff, such as {"global": {"rps": 5000}}; null means the value of the environment`)
	}
	return p, nil
}

// decodeType decodes the body of PATCH /v1/types/{type}.
func decodeType(body []byte) (p api.TypePatch, err error) {
	f, err := parseFields(body)
	if err != nil {
		return p, err
	}
	p.RPS = wholeChange(f, "rps", 1, maxRPS)
	p.InFlight = wholeChange(f, "in_flight", 1, maxInFlight)
	if err := f.err(); err != nil {
		return api.TypePatch{}, err
	}
	if p == (api.TypePatch{}) {
		return p, invalidField("body", `nothing to change: give rps, in_flight or both, such as {"rps": 50}; null ends a limit`)
	}
	return p, nil
}

// change reads a field that changes a setting: a value that parse accepts, or null for the default.
// problem says which values parse accepts.
func change[T any](
	f *fields, name, problem string, parse func(json.RawMessage) (T, bool),
) (c api.Change[T]) {
	_, c.Given = f.values[name]
	v := f.take(name)
	if v == nil {
		return c
	}
	value, ok := parse(v)
	if !ok {
		f.problem(name, problem)
	}
	c.Value = &value
	return c
}

func wholeChange(f *fields, name string, low, high int64) api.Change[int64] {
	number := numberIf(func(n float64) bool { return n == math.Trunc(n) && n >= float64(low) && n <= float64(high) })
	return change(f, name, fmt.Sprintf("must be a whole number from %d to %d", low, high),
		func(v json.RawMessage) (int64, bool) {
			n, ok := number(v)
			return int64(n), ok
		})
}

// backoffChange reads a change of a backoff, and keeps it as it was written.
func backoffChange(f *fields, name string) api.Change[string] {
	const problem = "must be a duration from 1ms to 24h, such as 500ms or 1m30s"
	return change(f, name, problem, func(v json.RawMessage) (s string, ok bool) {
		if json.Unmarshal(v, &s) != nil {
			return s, false
		}
		d, err := time.ParseDuration(s)
		return s, err == nil && d >= minBackoff && d <= maxBackoff
	})
}

// numberIf returns a function that parses a JSON number, and whether allowed accepts it.
func numberIf(allowed func(float64) bool) func(json.RawMessage) (float64, bool) {
	return func(v json.RawMessage) (float64, bool) {
		if c := v[0]; c != '-' && (c < '0' || c > '9') {
			return 0, false
		}
		n, err := strconv.ParseFloat(string(v), 64)
		return n, err == nil && allowed(n)
	}
}
