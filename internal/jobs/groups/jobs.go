package groups

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Job returns one job. For a waiting, non-ready or ready job it says why the job is not running.
func (s *Store) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
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
	for i := range status.Errors {
		j.Errors = append(j.Errors, errorView(&status.Errors[i]))
	}
	hideErrors(ctx, &j)
	if !mayWait[j.State] {
		return j, nil
	}
	letter, w, err := s.explainJob(ctx, p, group, ordinal, status.LastError())
	if err != nil {
		return j, apiError(err)
	}
	// The job may have moved since the first read. The answer has the state that the explanation is
	// about.
	if j.State = letter.Word(); mayWait[j.State] {
		j.Waiting, j.Until, j.Why, j.Key = w.Reason, w.Until, &w, w.Key
	}
	return j, nil
}

// JobQuery selects a page of a group's jobs. With Key the page has only the job with this key, or
// none. An empty State selects every state.
type JobQuery struct {
	State, Key, Cursor string
	Limit              int
}

// Jobs returns a page of a group's jobs. The cursor is the ordinal at which the next page begins. A
// call looks at a bounded number of jobs, so a page may have fewer than Limit, even none, and a
// cursor.
func (s *Store) Jobs(ctx context.Context, group string, q JobQuery) (api.JobList, error) {
	list := api.JobList{Jobs: []api.Job{}}
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return list, err
	}
	if q.Key != "" {
		return s.jobByKey(ctx, p, group, q)
	}
	from := int64(0)
	if q.Cursor != "" {
		if from, err = strconv.ParseInt(q.Cursor, 10, 64); err != nil || from < 0 || from >= messages.MaxTotal {
			return list, badCursor()
		}
	}
	found, next, err := ledger.ListJobs(ctx, s.conn.Cmd, p, group, q.State, from, q.Limit)
	if err != nil {
		return list, apiError(err)
	}
	for _, j := range found {
		shown := jobView(group, j.Ordinal, j.JobStatus)
		hideErrors(ctx, &shown)
		list.Jobs = append(list.Jobs, shown)
	}
	if next >= 0 {
		list.Cursor = strconv.FormatInt(next, 10)
	}
	return list, nil
}

// jobByKey returns a list with the job that has a key, if there is one and its state is the one
// that the query asks for. For a group without unique_keys it returns a *messages.ValidationError.
func (s *Store) jobByKey(ctx context.Context, p keyspace.Partition, group string, q JobQuery) (api.JobList, error) {
	list := api.JobList{Jobs: []api.Job{}}
	ordinal, unique, err := ledger.FindKey(ctx, s.conn.Cmd, p, group, q.Key)
	switch {
	case err != nil:
		return list, apiError(err)
	case !unique:
		return list, &messages.ValidationError{Fields: []messages.FieldError{{
			Field: "key",
			Problem: "can't be looked up, because the group was submitted without unique_keys: " +
				"look for it in the group's failures and results",
		}}}
	case ordinal < 0:
		return list, nil
	}
	status, err := ledger.ReadJob(ctx, s.conn.Cmd, p, group, ordinal)
	if err != nil {
		return list, apiError(err)
	}
	j := jobView(group, ordinal, status)
	hideErrors(ctx, &j)
	if j.Key = q.Key; q.State == "" || j.State == q.State {
		list.Jobs = append(list.Jobs, j)
	}
	return list, nil
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
	if e := status.LastError(); e != nil {
		last := errorView(e)
		j.LastError = &last
		j.Attempts = max(j.Attempts, e.Attempts)
		j.Key = e.Key
		if trace, ok := api.ParseTraceParent(e.Trace); ok {
			j.TraceID = hex.EncodeToString(trace.TraceID[:])
		}
	}
	return j
}

// hideErrors removes the error texts from the view of a job if the principal may not see them.
func hideErrors(ctx context.Context, j *api.Job) {
	if auth.SeesPayloads(ctx) {
		return
	}
	if j.LastError != nil {
		j.LastError.Error = ""
	}
	for i := range j.Errors {
		j.Errors[i].Error = ""
	}
}

func errorView(e *ledger.JobError) api.JobError {
	return api.JobError{Code: e.Code, Error: e.Error, Attempt: e.Attempts, At: e.Time()}
}

// Why says what the next job of a group waits for.
func (s *Store) Why(ctx context.Context, group string) (api.Why, error) {
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return api.Why{}, err
	}
	_, w, err := s.explainJob(ctx, p, group, ledger.NextJob, nil)
	return w, apiError(err)
}

const (
	mapAge      = 2 * time.Second // how long a map is shown again without reading the group
	maxKeptMaps = 64              // maps that are kept; one has 72 KB at most
)

// JobMap counts a group's jobs by state in this many buckets of consecutive ordinals, or in one
// bucket a job if the group has fewer jobs. The counts may be two seconds old, because they are
// reused: the states of a million jobs have 2 MB.
func (s *Store) JobMap(ctx context.Context, id string, buckets int) (m api.JobMap, err error) {
	p, tenant, err := s.locateGroup(ctx, id)
	if err != nil {
		return m, err
	}
	key := strings.Join([]string{tenant, id, strconv.Itoa(buckets)}, "/") // ids have no slash
	m, err = s.maps.get(ctx, key, func(api.JobMap) bool { return true }, func() (api.JobMap, error) {
		return ledger.ReadJobMap(ctx, s.conn.Cmd, p, id, int64(buckets))
	})
	if err != nil {
		return api.JobMap{}, apiError(err)
	}
	m.Buckets = slices.Clone(m.Buckets)
	return m, nil
}
