package groups

import (
	"context"
	"fmt"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// Job returns one job. For a waiting, non-ready or ready job it says why the job is not running.
func (s *views) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return api.Job{}, err
	}
	if ordinal < 0 || ordinal >= messages.MaxTotal {
		return api.Job{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	status, err := ledger.ReadJob(ctx, s.conn.Cmd, p, group, ordinal)
	if err != nil {
		return api.Job{}, apiError(err)
	}
	j := jobView(group, ordinal, status)
	if !mayWait[j.State] {
		return j, nil
	}
	letter, w, err := s.explainer.Job(ctx, p, group, ordinal, status.Err)
	if err != nil {
		return j, apiError(err)
	}
	// The job may have moved since the first read: the view shows the state that is explained.
	if j.State = letter.Word(); mayWait[j.State] {
		j.Waiting, j.Until, j.Why = w.Reason, w.Until, &w
	}
	return j, nil
}

// mayWait holds the states in which a job is not running and may still run.
var mayWait = map[string]bool{"waiting": true, "non_ready": true, "ready": true}

func jobView(group string, ordinal int64, status ledger.JobStatus) api.Job {
	j := api.Job{
		ID:       group + "." + strconv.FormatInt(ordinal, 10),
		Group:    group,
		Ordinal:  ordinal,
		State:    status.State.Letter().Word(),
		Attempts: status.State.Attempt(),
	}
	if e := status.Err; e != nil {
		j.LastError = &api.JobError{Code: e.Code, Error: e.Error, At: e.Time()}
		j.Attempts = max(j.Attempts, e.Attempts)
		j.Key = e.Key
	}
	return j
}

// Why says what the next job of a group waits for.
func (s *views) Why(ctx context.Context, group string) (api.Why, error) {
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return api.Why{}, err
	}
	w, err := s.explainer.Group(ctx, p, group)
	return w, apiError(err)
}
