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
	"github.com/bulkaction/bulkaction/internal/messages"
)

// The limits of a tenant's settings.
const (
	maxTenantRPS    = 1e9
	minTenantWeight = 0.001
	maxTenantWeight = 1000
	maxBasePriority = 1_000_000_000_000_000
)

// pauseHandler serves pause and resume of a tenant or a type. root is the path of its collection;
// name is the path parameter with its id.
func (s *server) pauseHandler(root, name string, paused bool, do func(context.Context, string) error) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		id, err := pathValue(r, name)
		if err != nil {
			return err
		}
		if err := s.decodeOptionalBody(r, &struct{}{}); err != nil {
			return err
		}
		ctx, cancel := detachedContext(r)
		defer cancel()
		if err := do(ctx, id); err != nil {
			return err
		}
		writeJSON(w, http.StatusAccepted, "application/json", api.Paused{
			ID:     id,
			Paused: paused,
			Links: map[string]string{
				"pause": root + id + "/pause", "resume": root + id + "/resume",
			},
		})
		return nil
	}
}

func (s *server) whyGroup(w http.ResponseWriter, r *http.Request) error {
	return answerByID(w, r, s.backend.Why)
}

// answerByID answers with what get returns for the id in the path.
func answerByID[T any](w http.ResponseWriter, r *http.Request, get func(context.Context, string) (T, error)) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	v, err := get(r.Context(), id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, "application/json", v)
	return nil
}

func (s *server) listTenants(w http.ResponseWriter, r *http.Request) error {
	cursor, limit, err := pageParams(r)
	if err != nil {
		return err
	}
	l, err := s.backend.Tenants(r.Context(), cursor, limit)
	if err != nil {
		return err
	}
	l.Tenants = orEmpty(l.Tenants)
	writeJSON(w, http.StatusOK, "application/json", l)
	return nil
}

func (s *server) getTenant(w http.ResponseWriter, r *http.Request) error {
	return answerByID(w, r, s.backend.Tenant)
}

func (s *server) setTenant(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	if _, err := mediaType(r, "application/json"); err != nil {
		return err
	}
	body, release, err := s.readBody(r, smallBody)
	defer release()
	if err != nil {
		return err
	}
	set, err := decodeSettings(body)
	if err != nil {
		return err
	}
	ctx, cancel := detachedContext(r)
	defer cancel()
	t, err := s.backend.SetTenant(ctx, id, set)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, "application/json", t)
	return nil
}

// decodeSettings decodes the body of PUT /v1/tenants/{id}. A field that is null counts as absent.
// The error lists every bad field.
func decodeSettings(body []byte) (api.TenantSettings, error) {
	var set api.TenantSettings
	if b := bytes.TrimSpace(body); len(b) == 0 || b[0] != '{' {
		return set, invalidField("body", `must be a JSON object such as {"rps": 50, "weight": 2}; {} sets the defaults`)
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(body, &fields); err != nil {
		return set, invalidField("body", "is not JSON: "+truncate(err.Error()))
	}
	bad := &messages.ValidationError{}
	addProblem := func(field, format string, args ...any) {
		const listed = 100
		if len(bad.Fields) == listed {
			bad.More++
			return
		}
		bad.Fields = append(bad.Fields, messages.FieldError{
			Field:   truncate(field),
			Problem: fmt.Sprintf(format, args...),
		})
	}
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		v := string(fields[field])
		if v == "null" && knownSetting[field] {
			continue
		}
		switch field {
		case "rps":
			if set.RPS = parseNumber(v); set.RPS == nil || *set.RPS <= 0 || *set.RPS > maxTenantRPS {
				addProblem(field, "must be a number above 0, to %d", int64(maxTenantRPS))
			}
		case "weight":
			if set.Weight = parseNumber(v); set.Weight == nil || *set.Weight < minTenantWeight ||
				*set.Weight > maxTenantWeight {
				addProblem(field, "must be a number from %g to %d", minTenantWeight, maxTenantWeight)
			}
		case "base_priority":
			if n := parseNumber(v); n != nil && *n == math.Trunc(*n) && math.Abs(*n) <= maxBasePriority {
				whole := int64(*n)
				set.BasePriority = &whole
			} else {
				addProblem(field, "must be a whole number from -%d to %[1]d", int64(maxBasePriority))
			}
		default:
			addProblem(field, "not a known field; known are base_priority, rps and weight")
		}
	}
	if len(bad.Fields) > 0 {
		return api.TenantSettings{}, bad
	}
	return set, nil
}

var knownSetting = map[string]bool{"rps": true, "weight": true, "base_priority": true}

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
