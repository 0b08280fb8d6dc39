package httpapi

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// fakeBackend is a backend in memory. A test may set the fields before mu to change its answers,
// before it sends requests.
type fakeBackend struct {
	retried  api.RetryChoice      // of the latest retry
	err      error                // returned by every call
	onAppend func(call int) error // called before each Append; call counts from 0
	results  func(func([]byte) error) error
	onGroup  func(ctx context.Context, read int) (api.Group, error) // replaces Group; read counts from 0

	largeAggregate bool // GroupSummary leaves out the aggregate

	mu         sync.Mutex
	groups     map[string]*fakeGroup
	keys       map[string]api.Accepted
	submits    []SubmitOptions
	appends    []AppendOptions
	queries    []ListQuery
	groupReads atomic.Int64
	limits     []int
	letters    []DeadLetterQuery
	sealedAt   map[string]*int64
	tenants    map[string]api.TenantSettings
	calls      []string // calls that no other field records
}

type fakeGroup struct {
	submitted messages.SubmitGroup
	view      api.Group
	jobs      []messages.Job
	requests  map[string]bool
}

func newFakeBackend() *fakeBackend {
	return &fakeBackend{groups: map[string]*fakeGroup{}, keys: map[string]api.Accepted{}, sealedAt: map[string]*int64{}, tenants: map[string]api.TenantSettings{}}
}

// withGroup adds a group and returns f.
func (f *fakeBackend) withGroup(id string) *fakeBackend {
	_, err := f.Submit(context.Background(), &messages.SubmitGroup{ID: id, Type: "NOOP"}, SubmitOptions{})
	if err != nil {
		panic(err)
	}
	f.submits = nil
	return f
}

func (f *fakeBackend) Submit(_ context.Context, g *messages.SubmitGroup, opt SubmitOptions) (api.Accepted, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.submits = append(f.submits, opt)
	if f.err != nil {
		return api.Accepted{}, f.err
	}
	if a, ok := f.keys[opt.IdempotencyKey]; ok {
		return a, nil
	}
	if f.groups[g.ID] != nil {
		return api.Accepted{}, fmt.Errorf("submit group %s: exists with other content: %w", g.ID, api.ErrConflict)
	}
	f.groups[g.ID] = &fakeGroup{submitted: *g, jobs: g.Jobs, requests: map[string]bool{}, view: api.Group{
		ID: g.ID, Tenant: g.ID, Type: g.Type, Priority: "normal", Status: api.StatusCreated, Round: 1,
		Timestamps: map[string]time.Time{"created": time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
	}}
	n := int64(len(g.Jobs))
	a := api.Accepted{ID: g.ID, Status: api.StatusCreated, Counts: api.Counts{Accepted: n, Waiting: n}}
	if opt.IdempotencyKey != "" {
		f.keys[opt.IdempotencyKey] = a
	}
	return a, nil
}

func (f *fakeBackend) Append(ctx context.Context, id string, jobs []messages.Job, opt AppendOptions) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	call := len(f.appends)
	f.appends = append(f.appends, opt)
	g, err := f.groupByID(id)
	if err != nil {
		return err
	}
	if f.onAppend != nil {
		if err := f.onAppend(call); err != nil {
			return err
		}
	}
	if g.requests[opt.RequestID] {
		return nil
	}
	if g.view.Sealed {
		return fmt.Errorf("append to group %s: %w", id, api.ErrSealed)
	}
	g.requests[opt.RequestID] = true
	g.jobs = append(g.jobs, jobs...)
	return ctx.Err()
}

func (f *fakeBackend) Jobs(_ context.Context, id string, q JobQuery) (api.JobList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g, err := f.groupByID(id)
	if err != nil {
		return api.JobList{}, err
	}
	var l api.JobList
	for i, j := range g.jobs {
		if q.Key == "" || j.Key == q.Key {
			l.Jobs = append(l.Jobs, api.Job{ID: fmt.Sprintf("%s.%d", id, i), Group: id, Ordinal: int64(i), Key: j.Key, State: "waiting"})
		}
	}
	if len(l.Jobs) > q.Limit {
		l.Jobs, l.Cursor = l.Jobs[:q.Limit], strconv.Itoa(q.Limit)
	}
	return l, nil
}

func (f *fakeBackend) groupByID(id string) (*fakeGroup, error) {
	if f.err != nil {
		return nil, f.err
	}
	g, ok := f.groups[id]
	if !ok {
		return nil, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	return g, nil
}

func (f *fakeBackend) payloads(id string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, j := range f.groups[id].jobs {
		out = append(out, string(j.Payload))
	}
	return out
}

func (f *fakeBackend) Seal(_ context.Context, id string, total *int64) (api.Accepted, error) {
	return f.change(id, func(g *fakeGroup) { g.view.Sealed, f.sealedAt[id] = true, total })
}

func (f *fakeBackend) Cancel(_ context.Context, id string) (api.Accepted, error) {
	return f.change(id, func(g *fakeGroup) { g.view.Status = api.StatusCancelled })
}

func (f *fakeBackend) Retry(_ context.Context, id string, choice api.RetryChoice) (api.Accepted, error) {
	f.retried = choice
	return f.change(id, func(g *fakeGroup) { g.view.Round++ })
}

func (f *fakeBackend) Pause(_ context.Context, id string) (api.Accepted, error) {
	return f.change(id, func(g *fakeGroup) { g.view.Paused = true })
}

func (f *fakeBackend) Resume(_ context.Context, id string) (api.Accepted, error) {
	return f.change(id, func(g *fakeGroup) { g.view.Paused = false })
}

func (f *fakeBackend) PauseTenant(_ context.Context, id string) error {
	return f.record("pause tenant " + id)
}
func (f *fakeBackend) ResumeTenant(_ context.Context, id string) error {
	return f.record("resume tenant " + id)
}
func (f *fakeBackend) PauseType(_ context.Context, id string) error {
	return f.record("pause type " + id)
}
func (f *fakeBackend) ResumeType(_ context.Context, id string) error {
	return f.record("resume type " + id)
}

func (f *fakeBackend) record(what string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, what)
	return f.err
}

func (f *fakeBackend) Tenants(_ context.Context, cursor string, limit int, all bool) (api.TenantList, error) {
	var l api.TenantList
	if cursor != "" {
		l.Tenants = []api.Tenant{{ID: cursor, Weight: 1, Window: api.TenantWindow{Limiter: "fixed", Share: "elastic"}}}
	}
	return l, f.record(fmt.Sprint("tenants ", cursor, " ", limit, " ", all))
}

func (f *fakeBackend) BusiestTenants(_ context.Context, limit int) (api.TenantList, error) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return api.TenantList{Tenants: []api.Tenant{tenantView("busy", api.TenantSettings{})}, AsOf: &at}, f.record(fmt.Sprint("busiest ", limit))
}

func (f *fakeBackend) History(_ context.Context, minutes int) (api.History, error) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return api.History{StepSeconds: 10, Points: []api.HistoryPoint{{T: at, Done: 2.5, Gauges: api.Gauges{Pool: 7}}}}, f.record(fmt.Sprint("history ", minutes))
}

func (f *fakeBackend) Audit(context.Context) (api.AuditState, error) {
	at, ordinal := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), int64(3)
	return api.AuditState{
		Partitions: []api.AuditedPartition{{Partition: 0, Leader: "w-1", LookedAt: &at}, {Partition: 1}},
		Violations: []api.Violation{{Law: "location", Group: "g", Ordinal: &ordinal, Detail: "it is gone"}},
		ByLaw:      map[string]int64{"location": 1},
	}, f.record("audit")
}

func (f *fakeBackend) Tenant(_ context.Context, id string) (api.Tenant, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	set, ok := f.tenants[id]
	if f.err == nil && !ok {
		return api.Tenant{}, fmt.Errorf("tenant %s: %w", id, api.ErrNotFound)
	}
	return tenantView(id, set), f.err
}

func (f *fakeBackend) SetTenant(_ context.Context, id string, set api.TenantSettings) (api.Tenant, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tenants[id] = set
	return tenantView(id, set), f.err
}

func (f *fakeBackend) PatchTenant(_ context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tenants[id] = patched(f.tenants[id], p)
	return tenantView(id, f.tenants[id]), f.err
}

func (f *fakeBackend) PreviewTenant(_ context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return tenantView(id, patched(f.tenants[id], p)), f.err
}

func patched(set api.TenantSettings, p api.TenantPatch) api.TenantSettings {
	if p.RPS.Given {
		set.RPS = p.RPS.Value
	}
	if p.Weight.Given {
		set.Weight = p.Weight.Value
	}
	if p.BasePriority.Given {
		set.BasePriority = p.BasePriority.Value
	}
	return set
}

func (f *fakeBackend) ResizeWorker(_ context.Context, id string, n int) error {
	return f.record(fmt.Sprint("resize worker ", id, " ", n))
}

func tenantView(id string, set api.TenantSettings) api.Tenant {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	t := api.Tenant{
		ID: id, RPS: set.RPS, Weight: 1, BasePriority: set.BasePriority,
		Window:     api.TenantWindow{Limiter: "fixed", Share: "elastic", WindowMS: 1000, NextPermitAt: &at},
		Congestion: api.TenantCongestion{Throttles: 1, LastAt: &at},
	}
	if set.Weight != nil {
		t.Weight = *set.Weight
	}
	return t
}

func (f *fakeBackend) Why(_ context.Context, id string) (api.Why, error) {
	if _, err := f.groupByID(id); err != nil {
		return api.Why{}, err
	}
	at, place, seconds := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), int64(3), 1.5
	return api.Why{
		Job: id + ".0", Reason: api.WhyRate, Detail: "it waits", Until: &at, Position: &place, EstimateSeconds: &seconds, PausedBy: []string{"tenant"},
		Limit: &api.WhyLimit{Scope: "tenant", RPS: 2.5, WindowMS: 1000, PerWindow: 2, Used: 2, NextPermitAt: &at},
	}, nil
}

func (f *fakeBackend) change(id string, do func(*fakeGroup)) (api.Accepted, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g, err := f.groupByID(id)
	if err != nil {
		return api.Accepted{}, err
	}
	do(g)
	return api.Accepted{ID: id, Status: g.view.Status, Counts: g.view.Counts}, nil
}

func (f *fakeBackend) Group(ctx context.Context, id string) (api.Group, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.onGroup != nil {
		read := f.groupReads.Add(1)
		return f.onGroup(ctx, int(read)-1)
	}
	g, err := f.groupByID(id)
	if err != nil {
		return api.Group{}, err
	}
	view := g.view
	view.Counts.Accepted = int64(len(g.jobs))
	view.Counts.Waiting = view.Counts.Accepted
	return view, nil
}

func (f *fakeBackend) GroupSummary(ctx context.Context, id string, _ int64) (api.Group, bool, error) {
	g, err := f.Group(ctx, id)
	return g, !f.largeAggregate, err
}

func (f *fakeBackend) Groups(_ context.Context, q ListQuery) (api.GroupList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queries = append(f.queries, q)
	var l api.GroupList
	for _, g := range f.groups {
		l.Groups = append(l.Groups, g.view)
	}
	slices.SortFunc(l.Groups, func(a, b api.Group) int { return -len(a.ID) + len(b.ID) })
	return l, f.err
}

func (f *fakeBackend) Results(_ context.Context, id string, yield func([]byte) error) error {
	if _, err := f.groupByID(id); err != nil {
		return err
	}
	if f.results == nil {
		return nil
	}
	return f.results(yield)
}

func (f *fakeBackend) Job(_ context.Context, id string, ordinal int64) (api.Job, error) {
	g, err := f.groupByID(id)
	if err != nil {
		return api.Job{}, err
	}
	if ordinal >= int64(len(g.jobs)) {
		return api.Job{}, fmt.Errorf("job %s.%d: %w", id, ordinal, api.ErrNotFound)
	}
	return api.Job{ID: fmt.Sprintf("%s.%d", id, ordinal), Group: id, Ordinal: ordinal, State: "waiting", Waiting: "fairness", Why: &api.Why{Reason: "fairness", Detail: "it waits"}}, nil
}

func (f *fakeBackend) DeadLetters(_ context.Context, q DeadLetterQuery) (api.DeadLetterList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limits = append(f.limits, q.Limit)
	f.letters = append(f.letters, q)
	if q.Cursor == "stale" {
		return api.DeadLetterList{}, fmt.Errorf("list dead letters: cursor of another list: %w", api.ErrInvalid)
	}
	return api.DeadLetterList{}, f.err
}

func (f *fakeBackend) Stats(context.Context) (api.Stats, error) {
	return api.Stats{
		Partitions: 1, Workers: []api.WorkerStatus{{ID: "w-1"}}, Stages: []api.StageStatus{{ID: "f-1", Role: "fetcher"}},
		RateLimit: api.RateLimit{Limiter: "fixed", Share: "elastic"},
	}, f.err
}

func (f *fakeBackend) Guards(_ context.Context, q guard.Query) (api.GuardList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprintf("guards %s %s %d", q.Kind, q.Cursor, q.Limit))
	return api.GuardList{Guards: []api.GuardSummary{{Name: "pool/smtp", Members: 3}}, Cursor: "0.5."}, f.err
}

func (f *fakeBackend) Guard(_ context.Context, name string) (api.Guard, error) {
	if name == "pool/none" {
		return api.Guard{}, fmt.Errorf("guard %s: %w", name, api.ErrNotFound)
	}
	left, at := int64(0), time.Unix(1e9, 0)
	return api.Guard{
		Name: name, Rev: 1, Spec: api.GuardSpec{Limiter: "sliding", Permits: 80, WindowMS: 600_000},
		Members: []api.GuardMember{{ID: "a", State: "cooling", Breaker: "open", OpenUntil: &at, Left: &left, NextAt: &at}},
	}, f.err
}

func (f *fakeBackend) ControlGuard(_ context.Context, name, member string, do guard.Action) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprintf("%s %s of %s", do, member, name))
	return f.err
}

func (f *fakeBackend) Rejected(_ context.Context, cursor string, limit int, data bool) (api.RejectedList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprintf("rejected %s %d %v", cursor, limit, data))
	return api.RejectedList{}, f.err
}
