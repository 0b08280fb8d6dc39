package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

const (
	defaultLimit = 50
	maxLimit     = 1000
	maxCursor    = 512 // in bytes
	idProblem    = "must match ^[A-Za-z0-9._-]{1,128}$"
)

func (s *server) submitGroup(w http.ResponseWriter, r *http.Request) error {
	if _, err := mediaType(r, "application/json"); err != nil {
		return err
	}
	key, err := idempotencyKey(r)
	if err != nil {
		return err
	}
	body, release, err := s.readBody(r, messages.MaxMessageBytes)
	defer release()
	if err != nil {
		return err
	}
	g, err := s.decoder.DecodeSubmit(body)
	if err != nil {
		return err
	}
	named := g.ID != ""
	if !named {
		g.ID = uuid.Must(uuid.NewV7()).String()
	}
	ctx, cancel := detachedContext(r)
	defer cancel()
	a, err := s.backend.Submit(ctx, g, SubmitOptions{
		IdempotencyKey: key,
		GeneratedID:    !named,
		TraceParent:    traceParent(r),
	})
	if err != nil {
		return err
	}
	writeAccepted(w, a)
	return nil
}

// detachedContext returns a context for a write to the store. The write continues when the client
// disconnects, so that it is not left half done. It ends after storeTimeout.
func detachedContext(r *http.Request) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), storeTimeout)
}

// writeAccepted answers a submission or a command on a group with status 202.
func writeAccepted(w http.ResponseWriter, a api.Accepted) {
	a.Links = groupLinks(a.ID)
	w.Header().Set("Location", a.Links["self"])
	writeJSON(w, http.StatusAccepted, "application/json", a)
}

func groupLinks(id string) map[string]string {
	self := "/v1/groups/" + id
	links := map[string]string{"self": self}
	for _, name := range []string{
		"jobs", "seal", "cancel", "pause", "resume", "retry", "why", "results", "failures", "events",
	} {
		links[name] = self + "/" + name
	}
	return links
}

// pathID returns the id in the path, or an error when it is not a valid id.
func pathID(r *http.Request) (string, error) { return pathValue(r, "id") }

func pathValue(r *http.Request, name string) (string, error) {
	id := r.PathValue(name)
	if !messages.ValidID(id) {
		return "", invalidField(name, idProblem)
	}
	return id, nil
}

func (s *server) sealGroup(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var body struct {
		Total *int64 `json:"total"`
	}
	if err := s.decodeOptionalBody(r, &body); err != nil {
		return err
	}
	if t := body.Total; t != nil && (*t < 0 || *t > messages.MaxTotal) {
		return invalidField("total", fmt.Sprintf("must be 0 to %d", messages.MaxTotal))
	}
	ctx, cancel := detachedContext(r)
	defer cancel()
	a, err := s.backend.Seal(ctx, id, body.Total)
	if err != nil {
		return err
	}
	writeAccepted(w, a)
	return nil
}

// commandHandler serves a command on a group that takes no arguments.
func (s *server) commandHandler(do func(context.Context, string) (api.Accepted, error)) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		id, err := pathID(r)
		if err != nil {
			return err
		}
		if err := s.decodeOptionalBody(r, &struct{}{}); err != nil {
			return err
		}
		ctx, cancel := detachedContext(r)
		defer cancel()
		a, err := do(ctx, id)
		if err != nil {
			return err
		}
		writeAccepted(w, a)
		return nil
	}
}

func (s *server) getGroup(w http.ResponseWriter, r *http.Request) error {
	return answerByID(w, r, func(ctx context.Context, id string) (api.Group, error) {
		g, err := s.backend.Group(ctx, id)
		return withEmptyMaps(g), err
	})
}

func (s *server) listGroups(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	query := ListQuery{Tenant: q.Get("tenant"), Status: api.Status(strings.ToUpper(q.Get("status")))}
	var err error
	if query.Cursor, query.Limit, err = pageParams(r); err != nil {
		return err
	}
	if query.Tenant != "" && !messages.ValidID(query.Tenant) {
		return invalidField("tenant", idProblem)
	}
	if query.Status != "" && rank(query.Status) == 0 {
		return invalidField("status",
			"must be CREATED, DISPATCHED, RUNNING, AGGREGATING, COMPLETED, FAILED or CANCELLED")
	}
	l, err := s.backend.Groups(r.Context(), query)
	if err != nil {
		return err
	}
	l.Groups = orEmpty(l.Groups)
	for i, g := range l.Groups {
		l.Groups[i] = withEmptyMaps(g)
	}
	writeJSON(w, http.StatusOK, "application/json", l)
	return nil
}

// pageParams returns the query parameters of a list: cursor and limit.
func pageParams(r *http.Request) (cursor string, limit int, err error) {
	q := r.URL.Query()
	cursor, limit = q.Get("cursor"), defaultLimit
	if len(cursor) > maxCursor {
		return "", 0, invalidField("cursor", "must be the cursor of an earlier page")
	}
	if v := q.Get("limit"); v != "" {
		if limit, err = strconv.Atoi(v); err != nil || limit < 1 || limit > maxLimit {
			return "", 0, invalidField("limit", fmt.Sprintf("must be 1 to %d", maxLimit))
		}
	}
	return cursor, limit, nil
}

func (s *server) getJob(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	ordinal, err := strconv.ParseUint(r.PathValue("ordinal"), 10, 63)
	if err != nil {
		return invalidField("ordinal", "must be a whole number from 0")
	}
	j, err := s.backend.Job(r.Context(), id, int64(ordinal))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, "application/json", j)
	return nil
}

func (s *server) listDeadLetters(w http.ResponseWriter, r *http.Request) error {
	cursor, limit, err := pageParams(r)
	if err != nil {
		return err
	}
	l, err := s.backend.DeadLetters(r.Context(), cursor, limit)
	if err != nil {
		return err
	}
	l.DeadLetters = orEmpty(l.DeadLetters)
	writeJSON(w, http.StatusOK, "application/json", l)
	return nil
}

func (s *server) getStats(w http.ResponseWriter, r *http.Request) error {
	st, err := s.backend.Stats(r.Context())
	if err != nil {
		return err
	}
	st.Types, st.Workers, st.Stages = orEmpty(st.Types), orEmpty(st.Workers), orEmpty(st.Stages)
	for i := range st.Workers {
		st.Workers[i].Types = orEmpty(st.Workers[i].Types)
		st.Workers[i].CurrentJobs = orEmpty(st.Workers[i].CurrentJobs)
	}
	for i := range st.Stages {
		st.Stages[i].Counts = orEmptyMap(st.Stages[i].Counts)
	}
	writeJSON(w, http.StatusOK, "application/json", st)
	return nil
}

// getIndex answers with links to the API's collections.
func (s *server) getIndex(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, "application/json", map[string]any{
		"name":    "bulkaction",
		"version": s.version,
		"links": map[string]string{
			"groups":       "/v1/groups",
			"tenants":      "/v1/tenants",
			"dead_letters": "/v1/dead-letters",
			"stats":        "/v1/stats",
			"openapi":      "/openapi.yaml",
		},
	})
	return nil
}

// withEmptyMaps replaces nil maps by empty ones, so that the JSON has {} instead of null.
func withEmptyMaps(g api.Group) api.Group {
	g.FailuresByCode = orEmptyMap(g.FailuresByCode)
	g.Aggregate = orEmptyMap(g.Aggregate)
	g.Timestamps = orEmptyMap(g.Timestamps)
	return g
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func orEmptyMap[T any](m map[string]T) map[string]T {
	if m == nil {
		return map[string]T{}
	}
	return m
}
