// Package apitest has stores in memory behind the HTTP API, for tests of the API and of what uses it.
package apitest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// Backend is a backend in memory. Before it gets requests, a test may set the fields before Mu to
// change its answers.
type Backend struct {
	Err       error                                                  // returned by every call
	OnAppend  func(call int) error                                   // called before each Append; call counts from 0
	OnResults func(yield func(line []byte) error) error              // replaces Results
	OnGroup   func(ctx context.Context, read int) (api.Group, error) // replaces Group; read counts from 0

	LargeAggregate bool // GroupSummary leaves out the aggregate

	Mu          sync.Mutex
	ByID        map[string]*Group
	Settings    map[string]api.TenantSettings // by tenant
	Global      api.GlobalPatch               // the changes of global limits
	TypeLimits  map[string]api.TypeLimits
	Pending     []int               // Limits.PendingPartitions of each answer
	Differ      []api.ProcessLimits // Limits.ProcessesThatDiffer
	Submits     []httpapi.SubmitOptions
	Appends     []httpapi.AppendOptions
	Queries     []messages.ListQuery
	GroupReads  atomic.Int64
	PageLimits  []int
	Letters     []messages.DeadLetterQuery
	SealedAt    map[string]*int64
	Retried     api.RetryChoice      // of the latest retry
	Started     api.OperationRequest // the latest one
	Redelivered []api.Redelivered    // the next answers of RedeliverDead
	Calls       []string             // calls that no other field records

	keys map[string]api.Accepted // by idempotency key
}

// Group is a group of a Backend.
type Group struct {
	Submitted messages.SubmitGroup
	View      api.Group
	Jobs      []messages.Job

	requests map[string]bool
}

// NewBackend returns a backend without groups.
func NewBackend() *Backend {
	return &Backend{ByID: map[string]*Group{}, keys: map[string]api.Accepted{}, SealedAt: map[string]*int64{}, Settings: map[string]api.TenantSettings{}, TypeLimits: map[string]api.TypeLimits{}}
}

// WithGroup adds a group and returns f.
func (f *Backend) WithGroup(id string) *Backend {
	_, err := f.Submit(context.Background(), &messages.SubmitGroup{ID: id, Type: "NOOP"}, httpapi.SubmitOptions{})
	if err != nil {
		panic(err)
	}
	f.Submits = nil
	return f
}

func (f *Backend) Submit(_ context.Context, g *messages.SubmitGroup, opt httpapi.SubmitOptions) (api.Accepted, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Submits = append(f.Submits, opt)
	if f.Err != nil {
		return api.Accepted{}, f.Err
	}
	if a, ok := f.keys[opt.IdempotencyKey]; ok {
		return a, nil
	}
	if f.ByID[g.ID] != nil {
		return api.Accepted{}, fmt.Errorf("submit group %s: exists with other content: %w", g.ID, api.ErrConflict)
	}
	f.ByID[g.ID] = &Group{Submitted: *g, Jobs: g.Jobs, requests: map[string]bool{}, View: api.Group{
		ID: g.ID, Tenant: g.ID, Tags: g.Tags, Type: g.Type, Priority: "normal", Status: api.StatusCreated, Round: 1,
		Timestamps: map[string]time.Time{"created": time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
	}}
	n := int64(len(g.Jobs))
	a := api.Accepted{ID: g.ID, Status: api.StatusCreated, Counts: api.Counts{Accepted: n, Waiting: n}}
	if opt.IdempotencyKey != "" {
		f.keys[opt.IdempotencyKey] = a
	}
	return a, nil
}

func (f *Backend) Append(ctx context.Context, id string, jobs []messages.Job, opt httpapi.AppendOptions) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	call := len(f.Appends)
	f.Appends = append(f.Appends, opt)
	g, err := f.GroupByID(id)
	if err != nil {
		return err
	}
	if f.OnAppend != nil {
		if err := f.OnAppend(call); err != nil {
			return err
		}
	}
	if g.requests[opt.RequestID] {
		return nil
	}
	if g.View.Sealed {
		return fmt.Errorf("append to group %s: %w", id, api.ErrSealed)
	}
	g.requests[opt.RequestID] = true
	g.Jobs = append(g.Jobs, jobs...)
	return ctx.Err()
}

func (f *Backend) Jobs(_ context.Context, id string, q messages.JobQuery) (api.JobList, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	g, err := f.GroupByID(id)
	if err != nil {
		return api.JobList{}, err
	}
	var l api.JobList
	for i, j := range g.Jobs {
		if q.Key == "" || j.Key == q.Key {
			l.Jobs = append(l.Jobs, api.Job{ID: fmt.Sprintf("%s.%d", id, i), Group: id, Ordinal: int64(i), Key: j.Key, State: "waiting"})
		}
	}
	if len(l.Jobs) > q.Limit {
		l.Jobs, l.Cursor = l.Jobs[:q.Limit], strconv.Itoa(q.Limit)
	}
	return l, nil
}

func (f *Backend) GroupByID(id string) (*Group, error) {
	if f.Err != nil {
		return nil, f.Err
	}
	g, ok := f.ByID[id]
	if !ok {
		return nil, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	return g, nil
}

func (f *Backend) Payloads(id string) []string {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	var out []string
	for _, j := range f.ByID[id].Jobs {
		out = append(out, string(j.Payload))
	}
	return out
}

func (f *Backend) Seal(_ context.Context, id string, total *int64) (api.Accepted, error) {
	return f.Change(id, func(g *Group) { g.View.Sealed, f.SealedAt[id] = true, total })
}

func (f *Backend) Cancel(_ context.Context, id string) (api.Accepted, error) {
	return f.Change(id, func(g *Group) { g.View.Status = api.StatusCancelled })
}

func (f *Backend) Retry(_ context.Context, id string, choice api.RetryChoice) (api.Accepted, error) {
	f.Retried = choice
	return f.Change(id, func(g *Group) { g.View.Round++ })
}

func (f *Backend) Pause(_ context.Context, id string) (api.Accepted, error) {
	return f.Change(id, func(g *Group) { g.View.Paused = true })
}

func (f *Backend) Resume(_ context.Context, id string) (api.Accepted, error) {
	return f.Change(id, func(g *Group) { g.View.Paused = false })
}

func (f *Backend) PauseTenant(_ context.Context, id string) error {
	return f.Record("pause tenant " + id)
}
func (f *Backend) ResumeTenant(_ context.Context, id string) error {
	return f.Record("resume tenant " + id)
}
func (f *Backend) PauseType(_ context.Context, id string) error {
	return f.Record("pause type " + id)
}
func (f *Backend) ResumeType(_ context.Context, id string) error {
	return f.Record("resume type " + id)
}

func (f *Backend) Record(what string) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Calls = append(f.Calls, what)
	return f.Err
}

func (f *Backend) Tenants(_ context.Context, cursor string, limit int, all bool) (api.TenantList, error) {
	var l api.TenantList
	if cursor != "" {
		l.Tenants = []api.Tenant{{ID: cursor, Weight: 1, Window: api.TenantWindow{Limiter: "fixed", Share: "elastic"}}}
	}
	return l, f.Record(fmt.Sprint("tenants ", cursor, " ", limit, " ", all))
}

func (f *Backend) BusiestTenants(_ context.Context, limit int) (api.TenantList, error) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return api.TenantList{Tenants: []api.Tenant{TenantView("busy", api.TenantSettings{})}, AsOf: &at}, f.Record(fmt.Sprint("busiest ", limit))
}

func (f *Backend) History(_ context.Context, minutes int) (api.History, error) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return api.History{StepSeconds: 10, Points: []api.HistoryPoint{{T: at, Done: 2.5, Gauges: api.Gauges{Pool: 7}}}}, f.Record(fmt.Sprint("history ", minutes))
}

func (f *Backend) Audit(context.Context) (api.AuditState, error) {
	at, ordinal := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), int64(3)
	return api.AuditState{
		Partitions: []api.AuditedPartition{{Partition: 0, Leader: "w-1", LookedAt: &at}, {Partition: 1}},
		Violations: []api.Violation{{Law: "location", Group: "g", Ordinal: &ordinal, Detail: "it is gone"}},
		ByLaw:      map[string]int64{"location": 1},
	}, f.Record("audit")
}

func (f *Backend) Tenant(_ context.Context, id string) (api.Tenant, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	set, ok := f.Settings[id]
	if f.Err == nil && !ok {
		return api.Tenant{}, fmt.Errorf("tenant %s: %w", id, api.ErrNotFound)
	}
	return TenantView(id, set), f.Err
}

func (f *Backend) SetTenant(_ context.Context, id string, set api.TenantSettings) (api.Tenant, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Settings[id] = set
	return TenantView(id, set), f.Err
}

func (f *Backend) PatchTenant(_ context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Settings[id] = Patched(f.Settings[id], p)
	return TenantView(id, f.Settings[id]), f.Err
}

func (f *Backend) PreviewTenant(_ context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	return TenantView(id, Patched(f.Settings[id], p)), f.Err
}

func Patched(set api.TenantSettings, p api.TenantPatch) api.TenantSettings {
	if p.RPS.Given {
		set.RPS = p.RPS.Value
	}
	if p.Weight.Given {
		set.Weight = p.Weight.Value
	}
	if p.BasePriority.Given {
		set.BasePriority = p.BasePriority.Value
	}
	if p.InFlight.Given {
		set.InFlight = p.InFlight.Value
	}
	return set
}

// Limits returns the limits of a process whose environment has the defaults.
func (f *Backend) Limits(context.Context) (api.Limits, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	l := api.Limits{Limiter: "fixed", WindowMS: 1000, Types: maps.Clone(f.TypeLimits), PendingPartitions: f.Pending, ProcessesThatDiffer: f.Differ}
	l.Global = api.GlobalLimits{
		RPS: setting(10_000, f.Global.RPS), Share: setting("elastic", f.Global.Share),
		DefaultBackoff: setting("1s", f.Global.DefaultBackoff), MaxBackoff: setting("1m0s", f.Global.MaxBackoff),
	}
	if f.Global != (api.GlobalPatch{}) && len(f.Pending) == 0 {
		at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
		l.AppliedAt = &at
	}
	return l, f.Err
}

func setting[T any](configured T, c api.Change[T]) api.LimitSetting[T] {
	if c.Value == nil {
		return api.LimitSetting[T]{Configured: configured, Effective: configured, Source: api.SourceEnvironment}
	}
	return api.LimitSetting[T]{Configured: configured, Effective: *c.Value, Source: api.SourceAPI}
}

func (f *Backend) PatchLimits(ctx context.Context, p api.LimitsPatch) (api.Limits, error) {
	f.Mu.Lock()
	f.Calls = append(f.Calls, "patch limits")
	if g := p.Global; f.Err == nil {
		f.Global.RPS = later(f.Global.RPS, g.RPS)
		f.Global.Share = later(f.Global.Share, g.Share)
		f.Global.DefaultBackoff = later(f.Global.DefaultBackoff, g.DefaultBackoff)
		f.Global.MaxBackoff = later(f.Global.MaxBackoff, g.MaxBackoff)
	}
	f.Mu.Unlock()
	return f.Limits(ctx)
}

func (f *Backend) PatchType(ctx context.Context, typ string, p api.TypePatch) (api.Limits, error) {
	f.Mu.Lock()
	f.Calls = append(f.Calls, "patch type "+typ)
	if f.Err == nil {
		t := f.TypeLimits[typ]
		t.RPS = later(api.Change[int64]{Value: t.RPS}, p.RPS).Value
		t.InFlight = later(api.Change[int64]{Value: t.InFlight}, p.InFlight).Value
		if f.TypeLimits[typ] = t; t.RPS == nil && t.InFlight == nil {
			delete(f.TypeLimits, typ)
		}
	}
	f.Mu.Unlock()
	return f.Limits(ctx)
}

func later[T any](before, change api.Change[T]) api.Change[T] {
	if change.Given {
		return change
	}
	return before
}

func (f *Backend) ResizeWorker(_ context.Context, id string, n int) error {
	return f.Record(fmt.Sprint("resize worker ", id, " ", n))
}

func TenantView(id string, set api.TenantSettings) api.Tenant {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	t := api.Tenant{
		ID: id, RPS: set.RPS, Weight: 1, BasePriority: set.BasePriority, InFlight: set.InFlight,
		Window:     api.TenantWindow{Limiter: "fixed", Share: "elastic", WindowMS: 1000, NextPermitAt: &at},
		Congestion: api.TenantCongestion{Throttles: 1, LastAt: &at},
	}
	if set.Weight != nil {
		t.Weight = *set.Weight
	}
	return t
}

func (f *Backend) Why(_ context.Context, id string) (api.Why, error) {
	if _, err := f.GroupByID(id); err != nil {
		return api.Why{}, err
	}
	at, place, seconds := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), int64(3), 1.5
	return api.Why{
		Job: id + ".0", Reason: api.WhyRate, Detail: "it waits", Until: &at, Position: &place, EstimateSeconds: &seconds, PausedBy: []string{"tenant"},
		Limit: &api.WhyLimit{Scope: "tenant", RPS: 2.5, WindowMS: 1000, PerWindow: 2, Used: 2, NextPermitAt: &at},
	}, nil
}

func (f *Backend) Change(id string, do func(*Group)) (api.Accepted, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	g, err := f.GroupByID(id)
	if err != nil {
		return api.Accepted{}, err
	}
	do(g)
	return api.Accepted{ID: id, Status: g.View.Status, Counts: g.View.Counts}, nil
}

func (f *Backend) Group(ctx context.Context, id string) (api.Group, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if f.OnGroup != nil {
		read := f.GroupReads.Add(1)
		return f.OnGroup(ctx, int(read)-1)
	}
	g, err := f.GroupByID(id)
	if err != nil {
		return api.Group{}, err
	}
	view := g.View
	view.Counts.Accepted = int64(len(g.Jobs))
	view.Counts.Waiting = view.Counts.Accepted
	return view, nil
}

func (f *Backend) GroupSummary(ctx context.Context, id string, _ int64) (api.Group, bool, error) {
	g, err := f.Group(ctx, id)
	return g, !f.LargeAggregate, err
}

func (f *Backend) Groups(_ context.Context, q messages.ListQuery) (api.GroupList, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Queries = append(f.Queries, q)
	var l api.GroupList
	for _, g := range f.ByID {
		l.Groups = append(l.Groups, g.View)
	}
	slices.SortFunc(l.Groups, func(a, b api.Group) int { return -len(a.ID) + len(b.ID) })
	return l, f.Err
}

func (f *Backend) Results(_ context.Context, id string, yield func([]byte) error) error {
	if _, err := f.GroupByID(id); err != nil {
		return err
	}
	if f.OnResults == nil {
		return nil
	}
	return f.OnResults(yield)
}

func (f *Backend) Job(_ context.Context, id string, ordinal int64) (api.Job, error) {
	g, err := f.GroupByID(id)
	if err != nil {
		return api.Job{}, err
	}
	if ordinal >= int64(len(g.Jobs)) {
		return api.Job{}, fmt.Errorf("job %s.%d: %w", id, ordinal, api.ErrNotFound)
	}
	return api.Job{ID: fmt.Sprintf("%s.%d", id, ordinal), Group: id, Ordinal: ordinal, State: "waiting", Waiting: "fairness", Why: &api.Why{Reason: "fairness", Detail: "it waits"}}, nil
}

func (f *Backend) DeadLetters(_ context.Context, q messages.DeadLetterQuery) (api.DeadLetterList, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.PageLimits = append(f.PageLimits, q.Limit)
	f.Letters = append(f.Letters, q)
	if q.Cursor == "stale" {
		return api.DeadLetterList{}, fmt.Errorf("list dead letters: cursor of another list: %w", api.ErrInvalid)
	}
	return api.DeadLetterList{}, f.Err
}

func (f *Backend) Scale(_ context.Context, types []string, drain time.Duration) (api.Scale, error) {
	return api.Scale{Type: strings.Join(types, ","), SlotsWanted: int64(drain.Seconds())}, f.Err
}

func (f *Backend) Stats(context.Context) (api.Stats, error) {
	return api.Stats{
		Partitions: 1, Layouts: map[string]string{"jobs": "1"}, Workers: []api.WorkerStatus{{ID: "w-1"}}, Stages: []api.StageStatus{{ID: "f-1", Role: "fetcher"}},
		RateLimit: api.RateLimit{Limiter: "fixed", Share: "elastic"},
	}, f.Err
}

func (f *Backend) Guards(_ context.Context, q guard.Query) (api.GuardList, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Calls = append(f.Calls, fmt.Sprintf("guards %s %s %d", q.Kind, q.Cursor, q.Limit))
	if q.Cursor != "" {
		return api.GuardList{Guards: []api.GuardSummary{{Name: "lock/report"}}}, f.Err
	}
	return api.GuardList{Guards: []api.GuardSummary{{Name: "pool/smtp", Members: 3}}, Cursor: "0.5."}, f.Err
}

func (f *Backend) Guard(_ context.Context, name string) (api.Guard, error) {
	if name == "pool/none" {
		return api.Guard{}, fmt.Errorf("guard %s: %w", name, api.ErrNotFound)
	}
	left, at := int64(0), time.Unix(1e9, 0)
	return api.Guard{
		Name: name, Rev: 1, Spec: api.GuardSpec{Limiter: "sliding", Permits: 80, WindowMS: 600_000},
		Members: []api.GuardMember{{ID: "a", State: "cooling", Breaker: "open", OpenUntil: &at, Left: &left, NextAt: &at}},
	}, f.Err
}

func (f *Backend) GuardKeys(_ context.Context, name string) (keys []string, more bool, err error) {
	return []string{"user-1", "user-2"}, true, f.Err
}

func (f *Backend) GuardHealth(context.Context) api.GuardHealth {
	return api.GuardHealth{
		Healthy: true, Redis: api.GuardRedisHealth{Reachable: true, PingMS: 0.5, Role: "master", MemoryRatio: 0.25},
		Guards: []api.GuardNamedHealth{{Name: "pool/smtp", MembersUsable: 2}},
	}
}

func (f *Backend) ControlGuard(_ context.Context, name, member string, do guard.Action) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Calls = append(f.Calls, fmt.Sprintf("%s %s of %s", do, member, name))
	if member == "nobody" {
		return fmt.Errorf("guard %s: member %s: %w", name, member, api.ErrNotFound)
	}
	return f.Err
}

func (f *Backend) Rejected(_ context.Context, cursor string, limit int, data bool) (api.RejectedList, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Calls = append(f.Calls, fmt.Sprintf("rejected %s %d %v", cursor, limit, data))
	return api.RejectedList{}, f.Err
}

var FailedAt = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// Failures yields two failed jobs. With the limit 1 it yields the first, and returns the cursor "1"
// for the other.
func (f *Backend) Failures(_ context.Context, id string, q messages.FailureQuery, yield func(api.Failure) error) (string, error) {
	if _, err := f.GroupByID(id); err != nil {
		return "", err
	}
	f.Mu.Lock()
	f.Calls = append(f.Calls, fmt.Sprintf("failures %+v", q))
	f.Mu.Unlock()
	for i := range int64(2) {
		if q.Cursor == "1" && i == 0 {
			continue
		}
		failure := api.Failure{Ordinal: i, Code: "PERMANENT", Error: "no such mailbox", Attempts: 1, At: FailedAt}
		if q.Payloads {
			failure.Payload = json.RawMessage(`{"to":"a"}`)
		}
		if err := yield(failure); err != nil {
			return "", err
		}
		if q.Limit == 1 && i == 0 {
			return "1", nil
		}
	}
	return "", nil
}

func (f *Backend) FailureSummary(_ context.Context, id string) (api.FailureSummary, error) {
	if _, err := f.GroupByID(id); err != nil {
		return api.FailureSummary{}, err
	}
	return api.FailureSummary{Total: 3, Seen: 3, Codes: []api.FailureCode{{
		Code: "PERMANENT", Count: 3, Fingerprints: []api.FailureFingerprint{{
			Text: "no mailbox <n>", Count: 3, Sampled: 3,
			Samples: []api.FailureSample{{Ordinal: 1, At: FailedAt, Error: "no mailbox 7"}},
		}},
	}}}, nil
}

func (f *Backend) CancelJob(_ context.Context, id string, ordinal int64) (api.Job, error) {
	if _, err := f.GroupByID(id); err != nil {
		return api.Job{}, err
	}
	job := fmt.Sprintf("%s.%d", id, ordinal)
	return api.Job{ID: job, Group: id, Ordinal: ordinal, State: "cancelled"}, f.Record("cancel job " + job)
}

func (f *Backend) TenantHistory(ctx context.Context, id string, _ int) (api.TenantHistory, error) {
	_, err := f.Tenant(ctx, id)
	return api.TenantHistory{StepSeconds: 20}, err
}

func (f *Backend) JobMap(_ context.Context, id string, buckets int) (api.JobMap, error) {
	if _, err := f.GroupByID(id); err != nil {
		return api.JobMap{}, err
	}
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Calls = append(f.Calls, fmt.Sprint("map ", buckets))
	return api.JobMap{Jobs: 2, Buckets: []api.MapBucket{{To: 1, Done: 1, Failed: 1}}}, nil
}
