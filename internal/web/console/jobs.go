package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const jobsPage = 50

// jobsData is the data of the list of a group's jobs.
type jobsData struct {
	Group  api.Group
	Counts []quantity // the group's jobs by state
	States []string
	Query  messages.JobQuery
	Typed  string // the ordinal that was looked for, if it was refused
	Jobs   []api.Job
	Next   string // path of the next page
}

// Filtered reports whether the list leaves out jobs.
func (d jobsData) Filtered() bool { return d.Query.State+d.Query.Code+d.Query.Key != "" }

// State returns the state of jobs that a value counts.
func (q quantity) State() string { return strings.ReplaceAll(q.Class, "-", "_") }

// jobs shows the list of a group's jobs. It redirects the browser to the page of the job whose ordinal
// is in the query, and to that of the only job with a key.
func (p groupPages) jobs(r *http.Request) (view, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return view{}, err
	}
	g, _, err := p.backend.GroupSummary(r.Context(), id, 0)
	if err != nil {
		return view{}, err
	}
	d := jobsData{Group: g, Counts: values(g.Counts), States: api.JobStates}
	v := view{name: "jobs", title: "Jobs of " + titleOf(g)}
	var l api.JobList
	if err = d.parse(r.URL.Query()); err == nil {
		l, err = p.backend.Jobs(r.Context(), id, d.Query)
	}
	if err != nil {
		_, bad := errors.AsType[*inputError](err)
		if problem, _, _ := httpapi.ProblemOf(err); !bad && problem.Status != http.StatusUnprocessableEntity {
			return view{}, err
		}
		v.data, v.refused = d, &refusal{cause: err} // such as a key, in a group without unique keys
		return v, nil
	}
	query := d.Query
	if query.Key != "" && query.Cursor+l.Cursor == "" && len(l.Jobs) == 1 {
		return view{}, redirectError(pathOfJob(id, l.Jobs[0].Ordinal))
	}
	d.Jobs, d.Next = l.Jobs, nextPage(root+"/groups/"+id+"/jobs", chosen(map[string]string{
		"state": query.State, "code": query.Code, "key": query.Key,
	}), l.Cursor)
	v.data = d
	return v, nil
}

// parse sets Query and Typed. For the ordinal of a job, it returns a redirectError to its page.
func (d *jobsData) parse(q url.Values) (err error) {
	d.Query = messages.JobQuery{State: q.Get("state"), Key: strings.TrimSpace(q.Get("key")), Limit: jobsPage}
	if d.Typed = strings.TrimSpace(q.Get("ordinal")); d.Typed != "" {
		ordinal, err := strconv.ParseUint(d.Typed, 10, 63)
		if jobs := d.Group.Counts.Accepted; err != nil || int64(ordinal) >= jobs {
			return invalid("The ordinal", "must be a whole number from 0, below %s: the group has so many jobs", count(jobs))
		}
		return redirectError(pathOfJob(d.Group.ID, int64(ordinal)))
	}
	if d.Query.Code, err = codeOf(q); err != nil {
		return err
	}
	if d.Query.Cursor, err = cursorOf(q); err != nil {
		return err
	}
	switch {
	case d.Query.State != "" && !slices.Contains(api.JobStates, d.Query.State):
		return notOneOf("state", api.JobStates)
	case d.Query.Key != "" && !messages.ValidJobKey(d.Query.Key):
		return invalid("key", "must %s", messages.JobKeyRule)
	}
	return nil
}

func pathOfJob(group string, ordinal int64) string {
	return fmt.Sprintf("%s/groups/%s/jobs/%d", root, group, ordinal)
}

// jobData is the data of a job's page.
type jobData struct {
	api.Job
	Of              api.Group
	Payload, Result string // with line breaks
	Timeline        []jobEvent
}

// Again reports whether the job took part in a later round of its group than the first. The store
// then has no times and errors of the rounds before.
func (d jobData) Again() bool {
	return d.Of.Round > 1 && len(d.Timeline) > 0 && !d.Timeline[0].At.Before(d.Of.Timestamps["created"])
}

// Name is what people call the job.
func (d jobData) Name() string { return cmp.Or(d.Key, strconv.FormatInt(d.Ordinal, 10)) }

// Stoppable reports whether the job can be cancelled: it has not started.
func (d jobData) Stoppable() bool {
	return !d.Of.Status.Ended() && slices.Contains([]string{"waiting", "non_ready", "ready"}, d.State)
}

// jobEvent is a line of a job's timeline: what happened at a time, or for how long the job waited.
type jobEvent struct {
	Name    string
	At      time.Time // zero: the event is a wait
	Seconds float64   // of the wait, or since the event before; 0: not shown
	Error   *api.JobError
}

// timeline returns what is known of a job's life, the oldest first.
func timeline(j api.Job) (all []jobEvent) {
	add := func(name string, at *time.Time) {
		if at != nil && !at.IsZero() {
			all = append(all, jobEvent{Name: name, At: *at})
		}
	}
	add("accepted", j.AcceptedAt)
	for _, e := range slices.Backward(j.Errors) {
		all = append(all, jobEvent{Name: fmt.Sprintf("attempt %d failed", e.Attempt), At: e.At, Error: &e})
	}
	add(fmt.Sprintf("attempt %d started", j.Attempts), j.StartedAt)
	add(j.State, j.EndedAt)
	slices.SortStableFunc(all, func(a, b jobEvent) int { return a.At.Compare(b.At) })
	for i := 1; i < len(all); i++ {
		all[i].Seconds = all[i].At.Sub(all[i-1].At).Seconds()
	}
	if w := j.Waits; w != nil {
		at := min(1, len(all)) // they are of all attempts, so they have no times
		if j.AcceptedAt == nil {
			at = 0
		}
		for _, wait := range []jobEvent{
			{Name: "waited after errors and for busy services", Seconds: float64(w.CongestionMS) / 1000},
			{Name: "waited for permits of rate limits", Seconds: float64(w.RateMS) / 1000},
			{Name: "waited for its turn", Seconds: float64(w.TurnMS) / 1000},
		} {
			if wait.Seconds > 0 {
				all = slices.Insert(all, at, wait)
			}
		}
	}
	return all
}

func (p groupPages) job(r *http.Request) (view, error) {
	id, ordinal, err := jobOf(r)
	if err != nil {
		return view{}, err
	}
	d, err := p.readJob(r.Context(), id, ordinal)
	if err != nil {
		return view{}, err
	}
	topic := fmt.Sprintf("job:%s/%d", id, ordinal)
	return view{name: "job", title: fmt.Sprintf("Job %s of %s", d.Name(), titleOf(d.Of)), data: d, topic: topic}, nil
}

// jobOf returns the job that the path of a request names.
func jobOf(r *http.Request) (group string, ordinal int64, err error) {
	if group, err = pathID(r, "id"); err == nil {
		ordinal, err = ordinalOf(group, r.PathValue("ordinal"))
	}
	return group, ordinal, err
}

func (p groupPages) openJob(ctx context.Context, arg string) (func(context.Context) (any, error), error) {
	id, text, _ := strings.Cut(arg, "/")
	ordinal, err := ordinalOf(id, text)
	if err != nil || !api.ValidID(id) {
		return nil, api.ErrNotFound
	}
	read := func(ctx context.Context) (any, error) { return p.readJob(ctx, id, ordinal) }
	_, err = read(ctx)
	return read, unlessAway(err)
}

// ordinalOf returns the ordinal of a job from a path. If the text is no ordinal, the error is
// api.ErrNotFound.
func ordinalOf(group, text string) (int64, error) {
	ordinal, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return 0, fmt.Errorf("job %.32q of group %s: %w", text, group, api.ErrNotFound)
	}
	return int64(ordinal), nil
}

func (p groupPages) readJob(ctx context.Context, group string, ordinal int64) (d jobData, err error) {
	if d.Job, err = p.backend.Job(ctx, group, ordinal); err != nil {
		return d, err
	}
	if d.Of, _, err = p.backend.GroupSummary(ctx, group, 0); err != nil {
		return d, err
	}
	if d.Timeline = timeline(d.Job); d.Again() && d.AcceptedAt != nil {
		d.Timeline[0].Name = fmt.Sprintf("queued in round %d", d.Of.Round)
	}
	if len(d.Job.Payload) > 0 {
		d.Payload = indented(d.Job.Payload)
	}
	if len(d.Job.Result) > 0 {
		d.Result = indented(d.Job.Result)
	}
	return d, nil
}

// retryJob runs a failed job of a group that has ended again.
func (p groupPages) retryJob(ctx context.Context, r *http.Request) (string, error) {
	id, ordinal, err := jobOf(r)
	if err == nil {
		_, err = p.backend.Retry(ctx, id, api.RetryChoice{Jobs: []int64{ordinal}})
	}
	return pathOfJob(id, ordinal) + "?done=job-retry", err
}

// cancelJob cancels a job that has not started.
func (p groupPages) cancelJob(ctx context.Context, r *http.Request) (string, error) {
	id, ordinal, err := jobOf(r)
	if err == nil {
		_, err = p.backend.CancelJob(ctx, id, ordinal)
	}
	return pathOfJob(id, ordinal) + "?done=job-cancel", err
}
