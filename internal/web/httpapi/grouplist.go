package httpapi

import (
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
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
