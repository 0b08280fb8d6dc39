package groups

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/reducer"
)

// Group returns one group.
func (s *Store) Group(ctx context.Context, id string) (api.Group, error) {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return api.Group{}, err
	}
	views, err := s.ReadViews(ctx, p, []string{id})
	if err != nil {
		return api.Group{}, apiError(err)
	}
	if len(views) == 0 {
		return api.Group{}, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	return views[0], nil
}

// GroupSummary returns one group. An aggregate that takes more than maxAggregate bytes in Redis is
// left out; then complete is false.
func (s *Store) GroupSummary(
	ctx context.Context, id string, maxAggregate int64,
) (g api.Group, complete bool, err error) {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return g, false, err
	}
	from, complete, err := ledger.ReadGroupSummary(ctx, s.conn.Cmd, p, id, maxAggregate)
	if err != nil {
		return g, false, apiError(err)
	}
	if from.Status == "" {
		return g, false, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	if !complete {
		from.Aggregates = ""
	}
	views, err := s.showGroups(ctx, p, []ledger.Group{from})
	if err != nil {
		return g, false, apiError(err)
	}
	return views[0], complete, nil
}

// ReadViews returns the views of groups of one partition. If an aggregate can't be computed, it
// logs that, and the view lacks the aggregate. It leaves out groups that do not exist.
func (s *Store) ReadViews(ctx context.Context, p keyspace.Partition, ids []string) ([]api.Group, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	groups, err := ledger.ReadGroups(ctx, s.conn.Cmd, p, ids)
	if err != nil {
		return nil, err
	}
	return s.showGroups(ctx, p, groups)
}

func (s *Store) showGroups(ctx context.Context, p keyspace.Partition, groups []ledger.Group) ([]api.Group, error) {
	views, sees := make([]api.Group, 0, len(groups)), auth.SeesPayloads(ctx)
	for i := range groups {
		v, err := s.View(&groups[i], time.Now())
		if err != nil { // this process may lack a reducer; the rest of the view is right
			s.tel.Log.WarnContext(ctx, "showed a group without its aggregate", "group", v.ID, "error", err)
		}
		if v.CallbackURL != "" && !sees {
			v.CallbackURL = webhook.WithoutQuery(v.CallbackURL)
		}
		views = append(views, v)
	}
	return views, s.estimate(ctx, p, views)
}

// View converts a group that was read at the time at to the API's form. It estimates the ETA from
// the group's own speed. If it returns an error, the view is complete except for the aggregate.
func (s *Store) View(from *ledger.Group, at time.Time) (api.Group, error) {
	g := api.Group{
		ID:             from.ID,
		Tenant:         from.Tenant,
		Name:           from.Name,
		Tags:           from.Tags,
		CallbackURL:    from.CallbackURL,
		SubmittedBy:    from.SubmittedBy,
		Type:           from.Type,
		Priority:       from.Lane,
		Status:         from.Status,
		Sealed:         from.Sealed,
		Paused:         from.Paused,
		Round:          from.Round,
		Total:          from.Total,
		Counts:         from.Counts,
		FailuresByCode: from.FailuresByCode,
		Throttles:      from.Throttles,
		Retries:        from.Retries,
		Timestamps:     from.Entered,
		MaxRetries:     from.MaxRetries, FailureThreshold: from.FailureThreshold, UniqueKeys: from.UniqueKeys,
	}
	if !from.RunAt.IsZero() {
		g.RunAt = new(from.RunAt.UTC())
	}
	if from.JobTimeout > 0 {
		g.JobTimeout = from.JobTimeout.String()
	}
	g.ETASeconds = eta(&g, from.Started, at)
	state, err := s.Merged(from.Aggregates, from.Partials)
	if err != nil {
		return g, fmt.Errorf("group %s: %w", g.ID, err)
	}
	g.Aggregate, err = state.Values()
	if g.AggregateErrors = state.Failed(); len(g.AggregateErrors) > 0 {
		return g, nil // the view says why values are missing
	}
	if err != nil {
		return g, fmt.Errorf("group %s: %w", g.ID, err)
	}
	return g, nil
}

// Merged returns the aggregate of a group, merged from its partial aggregates. asked is what the
// group asked for, encoded as in the group's hash.
func (s *Store) Merged(asked string, partials []string) (*reducer.State, error) {
	plan, err := ledger.AggregatePlan(s.reducers, asked)
	if err != nil {
		return nil, err
	}
	all := plan.New()
	for _, encoded := range partials {
		part, err := plan.Decode([]byte(encoded))
		if err != nil {
			return nil, err
		}
		if err := all.Merge(part); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// eta estimates how many seconds the group still needs, from its speed since it started; nil if it
// has ended or the speed is unknown. It serves callers that can't read the tenant's speed.
func eta(g *api.Group, started, now time.Time) *float64 {
	ended := g.Counts.Ended()
	elapsed := now.Sub(started).Seconds()
	if g.Status.Ended() || started.IsZero() || ended == 0 || elapsed <= 0 {
		return nil
	}
	seconds := round(float64(g.Counts.Accepted-ended)/(float64(ended)/elapsed), 10)
	return &seconds
}

// etaGroups is the most groups of a tenant that an estimate counts before a group. If there are
// more, the estimate is too low.
const etaGroups = 100

// estimate replaces the ETAs of groups of one partition. An ETA is the time that the unfinished
// jobs of the group, and the waiting jobs of groups that are before it in its tenant's queue, take
// at the speed at which the tenant's jobs end now. A group of which no job can end gets no ETA.
func (s *Store) estimate(ctx context.Context, p keyspace.Partition, views []api.Group) error {
	speeds := map[string]float64{}
	known := map[ledger.TenantQueue]bool{}
	for i := range views {
		g := &views[i]
		g.ETASeconds = nil
		if moving(g) {
			speeds[g.Tenant] = 0
			known[queueOf(g)] = true
		}
	}
	if len(speeds) == 0 {
		return nil
	}
	if err := s.speeds(ctx, p, speeds); err != nil {
		return err
	}
	queues, err := ledger.ReadQueues(ctx, s.conn.Cmd, p, slices.Collect(maps.Keys(known)), etaGroups)
	if err != nil {
		return err
	}
	for i := range views {
		g := &views[i]
		speed, queue := speeds[g.Tenant], queues[queueOf(g)]
		if !moving(g) || speed <= 0 || queue.TypePaused {
			continue
		}
		left := g.Counts.Accepted - g.Counts.Ended()
		if g.Counts.Waiting > 0 {
			for _, other := range queue.Groups {
				if other.ID == g.ID {
					break
				}
				left += other.Waiting
			}
		}
		seconds := round(float64(left)/speed, 10)
		g.ETASeconds = &seconds
	}
	return nil
}

// queueOf returns the queue that has the waiting jobs of the group's own type.
func queueOf(g *api.Group) ledger.TenantQueue {
	return ledger.TenantQueue{Type: g.Type, Lane: g.Priority, Tenant: g.Tenant}
}

// moving reports whether a group has jobs left that may run.
func moving(g *api.Group) bool {
	return !g.Status.Ended() && !g.Paused && g.Counts.Accepted > g.Counts.Ended()
}

// speeds sets how many jobs of each tenant end per second, at most what its limits allow. It leaves
// 0 for a paused tenant.
func (s *Store) speeds(ctx context.Context, p keyspace.Partition, of map[string]float64) error {
	tenants := make([]ledger.TenantRef, 0, len(of))
	for t := range of {
		tenants = append(tenants, ledger.TenantRef{Partition: p, ID: t})
	}
	states, err := s.tenantStates(ctx, tenants)
	if err != nil {
		return err
	}
	for i, t := range tenants {
		if !states[i].Paused {
			of[t.ID] = s.cfg.Meter.Bound(&states[i], states[i].PerSecond)
		}
	}
	return nil
}

func latestOf(first time.Time, more ...time.Time) time.Time {
	for _, at := range more {
		if at.After(first) {
			first = at
		}
	}
	return first
}

// timeIfAfter returns at in UTC and whole milliseconds if it is after now, otherwise nil.
func timeIfAfter(at, now time.Time) *time.Time {
	if !at.After(now) {
		return nil
	}
	at = at.Truncate(time.Millisecond).UTC()
	return &at
}

// round rounds v to a multiple of 1/parts.
func round(v, parts float64) float64 { return math.Round(v*parts) / parts }

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
	switch {
	case j.State == "done":
		j.PayloadHint = "Payloads of jobs that are done are not kept."
		return j, apiError(s.addResult(ctx, p, &j))
	case j.State == "in_flight":
		if err := s.addPayload(ctx, p, &j, nil, "Payloads up to 4 KiB are not looked for while the job runs."); err != nil {
			return j, apiError(err)
		}
		return j, apiError(s.addRun(ctx, &j))
	case j.State == "failed":
		if e := status.LastError(); e != nil && e.Job != nil {
			ended := e.Time()
			j.EndedAt = &ended
			return j, apiError(s.addPayload(ctx, p, &j, e.Job, "Its payload is not stored any more."))
		}
		j.PayloadHint = "The record of its failure, with its payload, is not stored any more."
		return j, nil
	case !mayWait[j.State]:
		j.PayloadHint = "Payloads of jobs that were cancelled are not kept."
		return j, nil
	}
	at, w, err := s.explainJob(ctx, p, group, ordinal, status.LastError())
	if err != nil {
		return j, apiError(err)
	}
	// The job may have moved since the first read. The answer has the state that the explanation is
	// about.
	if j.State = at.State.Word(); mayWait[j.State] {
		j.Waiting, j.Until, j.Why, j.Key = w.Reason, w.Until, &w, w.Key
		if j.Type = at.Type; len(at.Types) == 1 {
			j.Type = at.Types[0]
		}
		hint := "It is in the queue, where its payload is not looked for."
		if at.State != ledger.Waiting {
			hint = "Its payload was not looked for, or is not stored."
		}
		return j, apiError(s.addPayload(ctx, p, &j, at.blob, hint))
	}
	return j, nil
}

// addPayload adds to the view of a job what its blob says, and its payload if the principal may see
// it. blob is nil if the job was not looked for: then only a payload that is stored separately is
// found. absent is the hint if there is none.
func (s *Store) addPayload(ctx context.Context, p keyspace.Partition, j *api.Job, blob *ledger.Job, absent string) error {
	payload := ""
	if blob != nil {
		j.Type, payload = blob.Type, blob.Payload
		if j.LastError == nil || j.LastError.Code != "LOST" { // the audit does not know when a lost job was accepted
			accepted := blob.Accepted.UTC()
			j.AcceptedAt = &accepted
		}
		if j.State != "failed" { // its record has no waits
			fair, rate, congestion := blob.Waited()
			j.Waits = &api.JobWaits{
				TurnMS: fair.Milliseconds(), RateMS: rate.Milliseconds(), CongestionMS: congestion.Milliseconds(),
			}
		}
	}
	if !auth.SeesPayloads(ctx) {
		j.PayloadHint = "It is shown only to who may see payloads."
		return nil
	}
	if payload == "" {
		large, err := ledger.Payloads(ctx, s.conn.Cmd, p, []ledger.JobRef{{Group: j.Group, Ordinal: j.Ordinal}})
		if err != nil {
			return err
		}
		payload = large[0]
	}
	if !json.Valid([]byte(payload)) {
		j.PayloadHint = absent
		return nil
	}
	j.Payload = json.RawMessage(payload)
	return nil
}

// maxResultBytes bounds how much of a group's results is read to find that of one job.
const maxResultBytes = 10 << 20

// addResult adds to the view of a done job what its result line has.
func (s *Store) addResult(ctx context.Context, p keyspace.Partition, j *api.Job) error {
	line, all, err := ledger.FindResult(ctx, s.conn.Cmd, p, j.Group, j.Ordinal, maxResultBytes)
	if err != nil {
		return err
	}
	var r api.Result
	switch {
	case line != nil && json.Unmarshal(line, &r) == nil:
	case all:
		j.ResultHint = "Its result is not reduced yet, or was deleted when its retention ended."
		return nil
	default:
		j.ResultHint = fmt.Sprintf("Its result is not in the %d MiB of results that were searched: look for its "+
			"ordinal in GET /v1/groups/%[2]s/results or `bulkaction results %[2]s`.", maxResultBytes>>20, j.Group)
		return nil
	}
	seconds := r.DurationMS / 1000
	j.Key, j.Attempts, j.RunSeconds, j.Worker = cmp.Or(j.Key, r.Key), max(j.Attempts, r.Attempts), &seconds, r.Worker
	if r.StartedMS > 0 {
		at := time.UnixMilli(r.StartedMS).UTC()
		ended := at.Add(time.Duration(r.DurationMS * float64(time.Millisecond))).Truncate(time.Millisecond)
		j.StartedAt, j.EndedAt = &at, &ended
	}
	if auth.SeesPayloads(ctx) {
		if j.Result = r.Data; r.LastError != nil {
			j.LastError, j.Errors = r.LastError, []api.JobError{*r.LastError}
		}
	}
	return nil
}

// addRun adds to the view of a running job since when and where it runs, if its worker reports it.
func (s *Store) addRun(ctx context.Context, j *api.Job) error {
	workers, err := presence.Workers(ctx, s.conn, s.space)
	if err != nil {
		return err
	}
	for _, w := range workers {
		if at, runs := w.RunningSince[j.ID]; runs {
			// The worker's clock has set both times.
			seconds := max(0, round(w.SeenAt.Sub(at).Seconds(), 10))
			j.StartedAt, j.RunSeconds, j.Worker = &at, &seconds, w.ID
		}
	}
	return nil
}

// Jobs returns a page of a group's jobs. The cursor is the ordinal at which the next page begins. A
// call looks at a bounded number of jobs, so a page may have fewer than Limit, even none, and a
// cursor.
func (s *Store) Jobs(ctx context.Context, group string, q messages.JobQuery) (api.JobList, error) {
	list := api.JobList{Jobs: []api.Job{}}
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return list, err
	}
	if q.Code != "" {
		if q.State != "" && q.State != "failed" {
			return list, badField("state", "must be failed, or be left out, with code")
		}
		q.State = "failed"
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
	var found []ledger.ListedJob
	var next int64
	err = s.whole(ctx, p, group, func() (err error) {
		if q.Code != "" {
			found, next, err = s.failedWith(ctx, p, group, q, from)
		} else {
			found, next, err = ledger.ListJobs(ctx, s.conn.Cmd, p, group, q.State, from, q.Limit)
		}
		return apiError(err)
	})
	if err != nil {
		return list, err
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

// maxFailedRead is the number of failed jobs after which failedWith ends.
const maxFailedRead = 5000

// failedWith returns the first jobs from ordinal from on that have failed with the query's code, at
// most its Limit. next is the ordinal for the next call, -1 at the end of the group.
func (s *Store) failedWith(
	ctx context.Context, p keyspace.Partition, group string, q messages.JobQuery, from int64,
) (found []ledger.ListedJob, next int64, err error) {
	const step = 500
	if known, err := ledger.HasCode(ctx, s.conn.Cmd, p, group, q.Code); err != nil || !known {
		return nil, -1, err
	}
	for looked := 0; looked < maxFailedRead; looked += step {
		var failed []ledger.ListedJob
		if failed, next, err = ledger.ListJobs(ctx, s.conn.Cmd, p, group, q.State, from, step); err != nil {
			return nil, 0, err
		}
		for _, j := range failed {
			if !hasCode(j.JobStatus, q.Code) {
				continue
			}
			if len(found) == q.Limit {
				return found, j.Ordinal, nil
			}
			found = append(found, j)
		}
		if next < 0 || len(failed) < step { // the call has read as many states as it may
			return found, next, nil
		}
		from = next
	}
	return found, next, nil
}

func hasCode(j ledger.JobStatus, code string) bool {
	e := j.LastError()
	return e != nil && e.Code == code
}

// jobByKey returns a list with the job that has a key, if there is one and its state is the one
// that the query asks for. For a group without unique_keys it returns a *messages.ValidationError.
func (s *Store) jobByKey(ctx context.Context, p keyspace.Partition, group string, q messages.JobQuery) (api.JobList, error) {
	list := api.JobList{Jobs: []api.Job{}}
	ordinal, unique, err := ledger.FindKey(ctx, s.conn.Cmd, p, group, q.Key)
	switch {
	case err != nil:
		return list, apiError(err)
	case !unique:
		return list, badField("key", "can't be looked up, because the group was submitted without unique_keys: "+
			"look for it in the group's failures and results")
	case ordinal < 0:
		return list, nil
	}
	status, err := ledger.ReadJob(ctx, s.conn.Cmd, p, group, ordinal)
	if err != nil {
		return list, apiError(err)
	}
	j := jobView(group, ordinal, status)
	hideErrors(ctx, &j)
	if j.Key = q.Key; (q.State == "" || j.State == q.State) && (q.Code == "" || hasCode(status, q.Code)) {
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
		if e.Job != nil {
			j.Type = e.Job.Type
		}
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
