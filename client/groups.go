package client

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client/internal/submission"
)

// The lanes that Submission.Priority can name. A higher lane gets more capacity; a lower lane still
// gets some.
const (
	PriorityHigh   = "high"
	PriorityNormal = "normal"
	PriorityLow    = "low"
)

// Submission is a group to be created, with jobs or without. Only Type is required. The API shows
// the group as an api.Group.
type Submission struct {
	// ID matches ^[A-Za-z0-9._-]{1,128}$ and is neither . nor .. For an empty ID, the server or
	// the producer generates one.
	ID string `json:"id,omitempty"`
	// Tenant is the tenant whose share and limits the group uses. If it is empty, the group is its
	// own tenant.
	Tenant string `json:"tenant,omitempty"`
	Name   string `json:"name,omitempty"` // a name for people, up to 256 bytes
	// Tags are up to 8 pairs by which the group is found (see [GroupFilter]), such as campaign=spring.
	// api.ValidTag says what they may be.
	Tags         api.Tags `json:"tags,omitempty"`
	Type         string   `json:"type"`               // job type: names the processor that runs the jobs
	Priority     string   `json:"priority,omitempty"` // PriorityHigh, PriorityNormal (when empty) or PriorityLow
	BasePriority float64  `json:"base_priority,omitempty"`
	MaxRetries   *int     `json:"max_retries,omitempty"` // number of retries; nil: the workers' default
	// JobTimeout is the timeout of one attempt; 0: the workers' default.
	JobTimeout time.Duration `json:"-"`
	RunAt      *time.Time    `json:"run_at,omitempty"` // the group's jobs do not start before this time
	// FailureThreshold is the part of the group's jobs, above 0 to 1, that must fail for the group
	// to end as FAILED; nil is 1.
	FailureThreshold *float64 `json:"failure_threshold,omitempty"`
	// Aggregate lists the values to compute from the jobs' results.
	Aggregate []Aggregate `json:"aggregate,omitempty"`
	// CallbackURL is called when the group has ended, instead of the tenant's endpoint (see
	// [API.SetCallback] and [VerifyWebhook]).
	CallbackURL string `json:"callback_url,omitempty"`
	// Total is the number of jobs of the whole group; the group is sealed when it has them.
	Total *int64   `json:"total,omitempty"`
	Jobs  []NewJob `json:"-"`
	Seal  bool     `json:"seal,omitempty"` // the group gets no jobs besides Jobs
	// UniqueKeys refuses a job whose key another job of the group has. Only in such a group can a
	// job be found by its key (see [JobFilter]).
	UniqueKeys bool `json:"unique_keys,omitempty"`
}

// Aggregate asks for one value that is computed from the results of the group's done jobs. With
// Over it is computed from the errors of its failed jobs, {code, error, attempts}, or from both.
type Aggregate struct {
	As    string `json:"as"`              // the value's name in api.Group.Aggregate
	Op    string `json:"op"`              // count, sum, min, max, mean, distribution, count_by or collect
	Field string `json:"field,omitempty"` // path into {data, duration_ms} of a result, such as data.cost
	Over  string `json:"over,omitempty"`  // done (when empty), failed or ended
}

// NewJob is a job to be added to a group. The API shows it as an api.Job; a worker's processor gets
// it as a processor.Job.
type NewJob struct {
	Payload     any        `json:"payload"`               // encodes to JSON of at most 256 KiB; JSON of yours is a json.RawMessage
	Type        string     `json:"type,omitempty"`        // the group's type when empty
	RunAt       *time.Time `json:"run_at,omitempty"`      // the job does not start before this time
	TraceParent string     `json:"traceparent,omitempty"` // W3C traceparent; the job continues this trace
	// Key is your own name for the job, such as the recipient's id: 1 to 128 bytes of UTF-8 without
	// control characters. Results, failures and dead letters show it.
	Key string `json:"key,omitempty"`
}

func payloadOf(j NewJob) any { return j.Payload }

// MarshalJSON returns the body of POST /v1/groups.
func (g Submission) MarshalJSON() ([]byte, error) {
	jobs, err := submission.EncodeAll(g.Jobs, payloadOf)
	if err != nil {
		return nil, err
	}
	type withoutJobs Submission // it has no method MarshalJSON
	head := struct {
		withoutJobs
		JobTimeout string `json:"job_timeout,omitempty"`
	}{withoutJobs: withoutJobs(g)}
	if g.JobTimeout != 0 {
		head.JobTimeout = g.JobTimeout.String()
	}
	b, err := submission.Encode(head)
	if err != nil {
		return nil, fmt.Errorf("encode group %s: %w", g.ID, err)
	}
	return submission.WithJobs(b, jobs), nil
}

// Typed returns a function that makes jobs of type typ whose payloads are all a P, so that the
// compiler checks what a producer sends. The worker's side is processor.Typed.
func Typed[P any](typ string) func(payload P) NewJob {
	return func(payload P) NewJob { return NewJob{Type: typ, Payload: payload} }
}

// Submit creates a group with its jobs, if any. The request may have up to 32 MiB; add more jobs
// with Append.
func (a *API) Submit(ctx context.Context, g Submission, opts ...CallOption) (api.Accepted, error) {
	body, err := submission.Encode(g)
	if err != nil {
		return api.Accepted{}, err
	}
	return a.SubmitJSON(ctx, body, opts...)
}

// SubmitJSON creates a group from a complete request body of POST /v1/groups.
func (a *API) SubmitJSON(ctx context.Context, body []byte, opts ...CallOption) (api.Accepted, error) {
	header := http.Header{}
	header.Set(headerIdempotency, optionsOf(opts).key)
	return doJSON[api.Accepted](ctx, a, apiCall{
		action: "submit group",
		method: http.MethodPost,
		path:   "/v1/groups",
		header: header,
		body:   body,
	})
}

// Seal tells the server that no more jobs come to the group. With total, the group takes jobs until
// it has total jobs.
func (a *API) Seal(ctx context.Context, group string, total *int64) (api.Accepted, error) {
	c := command("seal", group)
	if total != nil {
		c.body = []byte(`{"total":` + strconv.FormatInt(*total, 10) + `}`)
	}
	return doJSON[api.Accepted](ctx, a, c)
}

// Cancel ends the group at once: no more of its jobs start, and all unfinished ones, also
// those in flight, become cancelled.
func (a *API) Cancel(ctx context.Context, group string) (api.Accepted, error) {
	return doJSON[api.Accepted](ctx, a, command("cancel", group))
}

// Delete deletes a group and all that is kept of its jobs. A group that has not ended is cancelled
// first. A second call returns ErrNotFound.
func (a *API) Delete(ctx context.Context, group string) (api.Deletion, error) {
	return doJSON[api.Deletion](ctx, a, callOn("delete", http.MethodDelete, "group", group, ""))
}

// Erase erases what is kept of the jobs of a tenant that have a key, in all its groups, and returns the
// sum of the calls that this takes; after an error, of those before it.
func (a *API) Erase(ctx context.Context, tenant, key string) (api.Erasure, error) {
	sum := api.Erasure{Tenant: tenant, Left: []api.ErasureLeft{}}
	for {
		body := map[string]string{"key": key}
		if sum.Next != "" {
			body["cursor"] = sum.Next
		}
		e, err := doJSON[api.Erasure](ctx, a, callOn("erase jobs of", http.MethodPost, "tenant", tenant, "/erase").withBody(body))
		if err != nil {
			return sum, err
		}
		sum.Groups, sum.Erased, sum.Left, sum.Next = sum.Groups+e.Groups, sum.Erased+e.Erased, append(sum.Left, e.Left...), e.Next
		if e.Next == "" {
			return sum, nil
		}
	}
}

// Retry opens the next round of an ended group, with its failed jobs only. The client repeats the
// call only after status 429. When it is unknown whether an attempt had its effect, Retry returns
// the error: a second attempt could open two rounds.
func (a *API) Retry(ctx context.Context, group string) (api.Accepted, error) {
	return a.RetryChosen(ctx, group, api.RetryChoice{})
}

// Pause stops the group: no more of its jobs start, and running jobs finish.
func (a *API) Pause(ctx context.Context, group string) (api.Accepted, error) {
	return doJSON[api.Accepted](ctx, a, command("pause", group))
}

// Resume undoes Pause.
func (a *API) Resume(ctx context.Context, group string) (api.Accepted, error) {
	return doJSON[api.Accepted](ctx, a, command("resume", group))
}

func command(verb, group string) apiCall {
	return callOn(verb, http.MethodPost, "group", group, "/"+verb)
}

// Group returns the group's current state.
func (a *API) Group(ctx context.Context, group string) (api.Group, error) {
	return doJSON[api.Group](ctx, a, callOn("get", http.MethodGet, "group", group, ""))
}

// Why says what the group's next job waits for. Job says it for any job of the group.
func (a *API) Why(ctx context.Context, group string) (api.Why, error) {
	return doJSON[api.Why](ctx, a, callOn("explain", http.MethodGet, "group", group, "/why"))
}

// Results iterates over the results of the group's reduced jobs, in the order in which they were
// reduced. Jobs that are done but not reduced yet are left out. An error ends the iteration; a
// stream that breaks off is an error too.
func (a *API) Results(ctx context.Context, group string) iter.Seq2[api.Result, error] {
	return streamLines[api.Result](ctx, a, group, "results")
}

// Failures iterates over the group's failed jobs, each once, in no particular order. An error ends the
// iteration; a stream that breaks off is an error too.
func (a *API) Failures(ctx context.Context, group string) iter.Seq2[api.Failure, error] {
	return streamLines[api.Failure](ctx, a, group, "failures")
}

// GroupFilter selects the groups that match all fields. An empty field matches every group.
type GroupFilter struct {
	Tenant string
	Status api.Status
	Type   string // the group's type, or that of one of its jobs
	Paused *bool  // whether the group itself is paused; a pause of its tenant or type does not count
	// FailedJobs is whether at least one job of the group has failed. A group with few failed jobs
	// is COMPLETED, not FAILED.
	FailedJobs *bool
	Tags       api.Tags  // all of them; fast with a Tenant
	Prefix     string    // the beginning of the id
	Name       string    // the whole name
	Since      time.Time // the group was created then or later
}

// Groups iterates over groups, newest first, and fetches one page after the other. The newest group
// is the one that was created last. With a Status other than CANCELLED and without a Tenant, it is
// the one that was opened or has ended last. An error ends the iteration.
func (a *API) Groups(ctx context.Context, f GroupFilter) iter.Seq2[api.Group, error] {
	query := url.Values{}
	for name, value := range map[string]string{
		"tenant": f.Tenant, "status": string(f.Status), "type": f.Type, "prefix": f.Prefix, "name": f.Name,
	} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if len(f.Tags) > 0 {
		query["tag"] = f.Tags.Pairs()
	}
	if f.Paused != nil {
		query.Set("paused", strconv.FormatBool(*f.Paused))
	}
	if f.FailedJobs != nil {
		query.Set("failed_jobs", strconv.FormatBool(*f.FailedJobs))
	}
	if !f.Since.IsZero() {
		query.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	return pages(ctx, a, "groups", query,
		func(l api.GroupList) ([]api.Group, string) { return l.Groups, l.Cursor })
}

// FailureQuery selects a page of the failed jobs of a group.
type FailureQuery struct {
	Code     string // only jobs that failed with this code; "": all
	Payloads bool   // with the payloads of the jobs
	Cursor   string // FailurePage.Cursor of the page before; "" for the first page
	Limit    int    // 1 to 1,000; 0 for the server's default
}

// FailurePage is a page of failed jobs, in the order of their ordinals. Its Cursor is "" on the
// last page.
type FailurePage struct {
	Failures []api.Failure
	Cursor   string
}

// FailurePage returns a page of the group's failed jobs. A page may have fewer jobs than q.Limit,
// even none, although more pages follow.
func (a *API) FailurePage(ctx context.Context, group string, q FailureQuery) (page FailurePage, err error) {
	c := callOn("list failures of", http.MethodGet, "group", group, "/failures")
	c.query = url.Values{"cursor": {q.Cursor}}
	if q.Limit != 0 {
		c.query.Set("limit", strconv.Itoa(q.Limit))
	}
	if q.Code != "" {
		c.query.Set("code", q.Code)
	}
	if q.Payloads {
		c.query.Set("payload", "true")
	}
	resp, err := a.do(ctx, c)
	if err != nil {
		return page, err
	}
	defer resp.Body.Close()
	defer drain(resp.Body)
	d := json.NewDecoder(resp.Body)
	for d.More() {
		var f api.Failure
		if err := d.Decode(&f); err != nil {
			return page, fmt.Errorf("%s: read answer: %w", c.action, err)
		}
		page.Failures = append(page.Failures, f)
	}
	page.Cursor = nextCursor(resp.Header.Get("Link"))
	return page, nil
}

// nextCursor returns the cursor in the header Link of a page; "" on the last page.
func nextCursor(link string) string {
	target, rest, _ := strings.Cut(strings.TrimPrefix(link, "<"), ">")
	u, err := url.Parse(target)
	if err != nil || !strings.Contains(rest, `rel="next"`) {
		return ""
	}
	return u.Query().Get("cursor")
}

// FailureSummary counts the group's failed jobs by error code and, as far as the API key may see
// payloads, up to 5,000 of them by what their errors have in common.
func (a *API) FailureSummary(ctx context.Context, group string) (api.FailureSummary, error) {
	return doJSON[api.FailureSummary](ctx, a,
		callOn("summarize failures of", http.MethodGet, "group", group, "/failures/summary"))
}

// JobMap divides the group's jobs by ordinal into ranges, and counts the jobs of each range by
// state. buckets is the number of ranges, 1 to 1,000; a group with fewer jobs has a range for each
// job. The answer may be two seconds old.
func (a *API) JobMap(ctx context.Context, group string, buckets int) (api.JobMap, error) {
	c := callOn("map jobs of", http.MethodGet, "group", group, "/map")
	c.query = url.Values{"buckets": {strconv.Itoa(buckets)}}
	return doJSON[api.JobMap](ctx, a, c)
}

// RetryChosen is Retry for only those failed jobs that the choice names; an empty choice names all.
// The others stay failed.
func (a *API) RetryChosen(ctx context.Context, group string, choice api.RetryChoice) (api.Accepted, error) {
	c := command("retry", group)
	c.onlyIfRefused = true
	if len(choice.Codes)+len(choice.Jobs) > 0 {
		c = c.withBody(choice)
	}
	return doJSON[api.Accepted](ctx, a, c)
}

// Job returns one job of the group: its state, and why it is waiting.
func (a *API) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	n := strconv.FormatInt(ordinal, 10)
	c := callOn("", http.MethodGet, "group", group, "/jobs/"+n)
	c.action = "get job " + group + "." + n
	return doJSON[api.Job](ctx, a, c)
}

// CancelJob ends a job that no worker has taken, as cancelled. It returns ErrConflict if the job is in
// flight or has ended.
func (a *API) CancelJob(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	n := strconv.FormatInt(ordinal, 10)
	c := callOn("", http.MethodPost, "group", group, "/jobs/"+n+"/cancel")
	c.action = "cancel job " + group + "." + n
	return doJSON[api.Job](ctx, a, c)
}

// JobFilter selects the jobs of a group that match all fields. An empty field matches every job.
// Only a group with UniqueKeys can be asked for a Key.
type JobFilter struct {
	State string // one of api.JobStates
	Key   string
	Code  string // of the error of a job that has failed
}

// Jobs iterates over jobs of a group in the order of their ordinals, and fetches one page after the
// other. It does not say why a job is waiting; Job does. An error ends the iteration.
func (a *API) Jobs(ctx context.Context, group string, f JobFilter) iter.Seq2[api.Job, error] {
	query := url.Values{}
	if f.State != "" {
		query.Set("state", f.State)
	}
	if f.Key != "" {
		query.Set("key", f.Key)
	}
	if f.Code != "" {
		query.Set("code", f.Code)
	}
	c := callOn("list jobs of", http.MethodGet, "group", group, "/jobs")
	return pagesOf(ctx, a, c, query,
		func(l api.JobList) ([]api.Job, string) { return l.Jobs, l.Cursor })
}

// FailuresWithPayloads is Failures with the payloads of the jobs.
func (a *API) FailuresWithPayloads(ctx context.Context, group string) iter.Seq2[api.Failure, error] {
	return streamLines[api.Failure](ctx, a, group, "failures?payload=true")
}
