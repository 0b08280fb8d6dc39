package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
)

// jobsAPI holds the calls on single jobs of a group.
type jobsAPI struct{ *transport }

// RetryChosen is Retry for only those failed jobs that the choice names; an empty choice names all.
// The others stay failed.
func (a *jobsAPI) RetryChosen(ctx context.Context, group string, choice api.RetryChoice) (api.Accepted, error) {
	c := command("retry", group)
	c.onlyIfRefused = true
	if len(choice.Codes)+len(choice.Jobs) > 0 {
		c = c.withBody(choice)
	}
	return doJSON[api.Accepted](ctx, a.transport, c)
}

// Job returns one job of the group: its state, and why it is waiting.
func (a *jobsAPI) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	n := strconv.FormatInt(ordinal, 10)
	c := callOn("", http.MethodGet, "group", group, "/jobs/"+n)
	c.action = "get job " + group + "." + n
	return doJSON[api.Job](ctx, a.transport, c)
}

// JobFilter selects the jobs of a group that match both fields. An empty field matches every job.
// Only a group with UniqueKeys can be asked for a Key.
type JobFilter struct {
	State string // one of api.JobStates
	Key   string
}

// Jobs iterates over jobs of a group in the order of their ordinals, and fetches one page after the
// other. It does not say why a job is waiting; Job does. An error ends the iteration.
func (a *jobsAPI) Jobs(ctx context.Context, group string, f JobFilter) iter.Seq2[api.Job, error] {
	query := url.Values{}
	if f.State != "" {
		query.Set("state", f.State)
	}
	if f.Key != "" {
		query.Set("key", f.Key)
	}
	c := callOn("list jobs of", http.MethodGet, "group", group, "/jobs")
	return pagesOf(ctx, a.transport, c, query,
		func(l api.JobList) ([]api.Job, string) { return l.Jobs, l.Cursor })
}

// FailuresWithPayloads is Failures with the payloads of the jobs.
func (a *jobsAPI) FailuresWithPayloads(ctx context.Context, group string) iter.Seq2[api.Failure, error] {
	return streamLines[api.Failure](ctx, a.transport, group, "failures?payload=true")
}
