package console

import (
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// links returns the targets of the page's links.
func (d document) links() (all []string) {
	for _, a := range d.all("a") {
		all = append(all, attribute(a, "href"))
	}
	return all
}

// TestJobs: the list of a group's jobs passes its filters to the store, keeps them in the link to the
// next page, and leads to the page of the only job with a key.
func TestJobs(t *testing.T) {
	w := parallel(t)
	d := w.page("/ui/groups/failed-1/jobs?state=failed&code=PERMANENT&cursor=c")
	require.Equal(t, messages.JobQuery{State: "failed", Code: "PERMANENT", Cursor: "c", Limit: 50}, w.backend.jobQuery)
	require.Contains(t, d.text, "job 7 failed 1 PERMANENT "+hostile)
	require.Contains(t, d.text, "all 1,000 done 900 failed 100")
	require.Subset(t, d.links(), []string{"/ui/groups/failed-1/jobs?state=in_flight", "/ui/groups/failed-1/jobs/7"})
	require.Contains(t, w.page("/ui/groups/failed-1/jobs?key=none").text, "No job fits.")
	require.Equal(t, "/ui/groups/failed-1/jobs/7", w.get("/ui/groups/failed-1/jobs?key=ann").Header().Get("Location"))
	refused(t, w.get("/ui/groups/failed-1/jobs?key=repeated"), http.StatusUnprocessableEntity, "key can't be looked up", url.Values{"key": {"repeated"}})
	for query, text := range map[string]string{"state=odd": "state must be one of waiting,", "key=%01": "key must be"} {
		answer := w.get("/ui/groups/failed-1/jobs?" + query)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
		require.Contains(t, answer.Body.String(), text)
	}
	require.Subset(t, w.page("/ui/groups/failed-1").links(), []string{
		"/ui/groups/failed-1/jobs?state=done", "/ui/groups/failed-1/jobs?state=failed&code=PERMANENT",
	})
}

func TestJobActions(t *testing.T) {
	w := parallelAs(t, admin)
	for path, call := range map[string]string{"retry": "retry 7 running-1", "cancel": "cancel job running-1 7"} {
		answer := w.post("/ui/groups/running-1/jobs/7/"+path, url.Values{})
		require.Equal(t, "/ui/groups/running-1/jobs/7?done=job-"+path, answer.Header().Get("Location"))
		require.Contains(t, w.backend.calls, call)
	}
	require.Contains(t, w.page("/ui/groups/running-1/jobs/7").actions(), "/ui/groups/running-1/jobs/7/cancel")
	require.NotContains(t, as(t, reader).page("/ui/groups/running-1/jobs/7").actions(), "/ui/groups/running-1/jobs/7/cancel")
	require.Equal(t, http.StatusForbidden, as(t, reader).post("/ui/groups/running-1/jobs/7/cancel", nil).Code)
}

// TestTimeline: what is known of a job is in the order in which it happened, with the times between.
func TestTimeline(t *testing.T) {
	t.Parallel()
	at := func(s int) *time.Time { return new(created.Add(time.Duration(s) * time.Second)) }
	first, last := api.JobError{Attempt: 1, At: *at(5)}, api.JobError{Attempt: 2, At: *at(30)}
	j := api.Job{
		State: "failed", Attempts: 2, AcceptedAt: at(0), StartedAt: at(20), EndedAt: at(30),
		Errors: []api.JobError{last, first}, Waits: &api.JobWaits{TurnMS: 2000, CongestionMS: 15000},
	}
	require.Equal(t, []jobEvent{
		{Name: "accepted", At: *at(0)},
		{Name: "waited for its turn", Seconds: 2},
		{Name: "waited after errors and for busy services", Seconds: 15},
		{Name: "attempt 1 failed", At: *at(5), Seconds: 5, Error: &first},
		{Name: "attempt 2 started", At: *at(20), Seconds: 15},
		{Name: "attempt 2 failed", At: *at(30), Seconds: 10, Error: &last},
		{Name: "failed", At: *at(30)},
	}, timeline(j))
	require.Empty(t, timeline(api.Job{State: "waiting"}))
	for _, c := range []struct {
		round, accepted int
		again           bool
	}{{1, 0, false}, {2, 5, true}, {2, -5, false}} { // the last one did not run again
		g := api.Group{Round: c.round, Timestamps: map[string]time.Time{"created": created}}
		d := jobData{Of: g, Timeline: timeline(api.Job{AcceptedAt: at(c.accepted)})}
		require.Equal(t, c.again, d.Again())
	}
}

// TestRefusedFilters: a list whose filter can't be used shows its form again.
func TestRefusedFilters(t *testing.T) {
	w := parallelAs(t, operator)
	for path, want := range map[string]url.Values{
		"/ui/groups/failed-1/jobs?ordinal=": {"ordinal": {"abc"}}, "/ui/groups/failed-1/jobs?code=x&ordinal=": {"ordinal": {"1000"}},
		"/ui/dead-letters?since=": {"since": {"abc"}}, "/ui/callbacks?state=odd&tenant=": {"tenant": {"acme"}},
	} {
		for name := range want {
			d := refused(t, w.get(path+want.Get(name)), http.StatusUnprocessableEntity, "must be", nil)
			require.NotContains(t, d.text, "No ")
			if name != "since" { // browsers show only times in it
				require.Equal(t, want.Get(name), d.typed()[name])
			}
		}
	}
}
