package httpapi

import (
	"net/http"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

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
