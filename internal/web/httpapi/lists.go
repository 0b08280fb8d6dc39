package httpapi

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// ListQuery selects a page of the list of groups. An empty filter matches every group; an empty
// Cursor means the first page.
type ListQuery struct {
	Tenant string
	Status api.Status
	Type   string // the group's, or that of one of its jobs
	Paused *bool  // whether the group itself is paused
	// FailedJobs: true selects groups with at least one failed job, false those without, whatever
	// their status is.
	FailedJobs *bool
	Prefix     string    // the beginning of the id
	Since      time.Time // the group was created then or later
	Cursor     string
	Limit      int // 1 to 1,000
}

// groupFilters are the query parameters that select groups.
var groupFilters = []string{"tenant", "status", "type", "paused", "failed_jobs", "prefix", "since"}

func (s *server) listGroups(r *http.Request) (l api.GroupList, err error) {
	query, err := groupQuery(r)
	if err != nil {
		return l, err
	}
	l, err = s.Backend.Groups(r.Context(), query)
	l.Groups = orEmpty(l.Groups)
	for i, g := range l.Groups {
		l.Groups[i] = withEmptyMaps(g)
	}
	return l, err
}

// groupQuery parses the query parameters of the list of groups.
func groupQuery(r *http.Request) (q ListQuery, err error) {
	v := r.URL.Query()
	q = ListQuery{
		Tenant: v.Get("tenant"), Status: api.Status(strings.ToUpper(v.Get("status"))),
		Type: v.Get("type"), Prefix: v.Get("prefix"),
	}
	if q.Cursor, q.Limit, err = pageParams(r); err != nil {
		return q, err
	}
	for _, name := range []string{"tenant", "type", "prefix"} {
		if id := v.Get(name); id != "" && !api.ValidID(id) {
			return q, invalidField(name, idProblem)
		}
	}
	if q.Status != "" && rank(q.Status) == 0 {
		return q, invalidField("status",
			"must be CREATED, DISPATCHED, RUNNING, AGGREGATING, COMPLETED, FAILED or CANCELLED")
	}
	for name, to := range map[string]**bool{"paused": &q.Paused, "failed_jobs": &q.FailedJobs} {
		if v.Get(name) == "" {
			continue
		}
		yes, err := boolParam(r, name)
		if err != nil {
			return q, err
		}
		*to = &yes
	}
	q.Since, err = sinceParam(v)
	return q, err
}

// sinceParam returns the query parameter since, a time; the zero time if it is absent.
func sinceParam(q url.Values) (since time.Time, err error) {
	text := q.Get("since")
	if text == "" {
		return since, nil
	}
	if since, err = time.Parse(time.RFC3339, text); err != nil || since.UnixMilli() < 0 {
		return since, invalidField("since", "must be a time such as 2026-01-02T15:04:05Z, from 1970 on")
	}
	return since, nil
}

// listJobs returns the function that reads the list of a group's jobs: a page, or only the job with
// a given key, if there is one.
func listJobs(b Backend) func(*http.Request) (api.JobList, error) {
	return func(r *http.Request) (l api.JobList, err error) {
		id, err := pathID(r)
		if err != nil {
			return l, err
		}
		q := r.URL.Query()
		query := JobQuery{State: q.Get("state"), Key: q.Get("key")}
		if query.Cursor, query.Limit, err = pageParams(r); err != nil {
			return l, err
		}
		if query.State != "" && !slices.Contains(api.JobStates, query.State) {
			return l, invalidField("state", "must be one of "+strings.Join(api.JobStates, ", "))
		}
		if q.Has("key") && !messages.ValidJobKey(query.Key) {
			return l, invalidField("key", "must "+messages.JobKeyRule)
		}
		l, err = b.Jobs(r.Context(), id, query)
		l.Jobs = orEmpty(l.Jobs)
		return l, err
	}
}

// listRejected returns the function that reads a page of the messages that ingest has rejected. The
// page has their data only with data=true, because the data may be personal, and a page of it is
// large.
func listRejected(b Backend) func(*http.Request) (api.RejectedList, error) {
	return func(r *http.Request) (l api.RejectedList, err error) {
		cursor, limit, err := pageParams(r)
		if err != nil {
			return l, err
		}
		data, err := boolParam(r, "data")
		if err != nil {
			return l, err
		}
		l, err = b.Rejected(r.Context(), cursor, limit, data)
		l.Rejected = orEmpty(l.Rejected)
		return l, err
	}
}

// boolParam returns a query parameter that is true or false; false if it is absent.
func boolParam(r *http.Request, name string) (bool, error) {
	v := r.URL.Query().Get(name)
	if v != "" && v != "true" && v != "false" {
		return false, invalidField(name, "must be true or false")
	}
	return v == "true", nil
}

// SubmitOptions is the data of a submission beside its body.
type SubmitOptions struct {
	GeneratedID bool // the client gave no id; the API has generated one
	// IdempotencyKey is the request's header; "" when it is absent, else 1 to 255 bytes of visible
	// ASCII. Hash it before it becomes part of a Redis key.
	IdempotencyKey string
	TraceParent    string // W3C traceparent of the request; "" when it is absent or malformed
}

// JobQuery selects a page of a group's jobs. With Key it selects only the job with this key, if
// there is one. An empty State matches every job; an empty Cursor means the first page.
type JobQuery struct {
	State, Key, Cursor string
	Limit              int // 1 to 1,000
}

// DeadLetterQuery selects a page of dead letters. An empty Tenant, Group, Type or Code matches
// every dead letter. Older ones than Since are left out, unless Since is zero. An empty Cursor
// means the first page.
type DeadLetterQuery struct {
	Tenant, Group, Type, Code string
	Since                     time.Time
	Cursor                    string
	Limit                     int // 1 to 1,000
}
