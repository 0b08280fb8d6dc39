package console

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// workersPage shows the live processes of all roles.
type workersPage struct{ backend httpapi.Backend }

// workersData is the data of the page of processes.
type workersData struct {
	Roles    []api.RoleStatus
	Workers  []workerRow
	Stages   []api.StageStatus // by role
	Slots    int
	Busy     int
	Unserved []api.TypeStats // types that have jobs and no worker
	Versions []string
	Layouts  map[string]string
}

type workerRow struct {
	api.WorkerStatus
	Jobs []jobLink
}

// jobLink is the id of a job, and the path of the job's page; "" if the id is not GROUP.ORDINAL.
type jobLink struct{ ID, Path string }

func (p workersPage) view(r *http.Request) (view, error) {
	data, err := p.read(r.Context())
	return view{name: "workers", title: "Workers", data: data, topic: "workers"}, err
}

func (p workersPage) open(_ context.Context, arg string) (func(context.Context) (any, error), error) {
	if arg != "" {
		return nil, api.ErrNotFound
	}
	return p.read, nil
}

func (p workersPage) read(ctx context.Context) (any, error) {
	s, err := p.backend.Stats(ctx)
	if err != nil {
		return nil, err
	}
	d := workersData{Roles: s.Roles, Stages: slices.Clone(s.Stages), Layouts: s.Layouts}
	for _, w := range s.Workers {
		row := workerRow{WorkerStatus: w}
		for _, id := range w.CurrentJobs {
			row.Jobs = append(row.Jobs, jobLink{id, jobPath(id)})
		}
		d.Workers = append(d.Workers, row)
		d.Slots += w.Workers
		d.Busy += w.Active
		d.Versions = append(d.Versions, w.Version)
	}
	for _, p := range d.Stages {
		d.Versions = append(d.Versions, p.Version)
	}
	for _, t := range s.Types {
		if t.Workers == 0 && t.Backlog+t.InFlight > 0 {
			d.Unserved = append(d.Unserved, t)
		}
	}
	slices.Sort(d.Versions)
	d.Versions = slices.Compact(d.Versions)
	slices.SortStableFunc(d.Stages, func(a, b api.StageStatus) int {
		return cmp.Compare(slices.Index(api.Roles, a.Role), slices.Index(api.Roles, b.Role))
	})
	return d, nil
}

// jobPath returns the path of a job's page for the id GROUP.ORDINAL; "" for any other text.
func jobPath(id string) string {
	i := strings.LastIndexByte(id, '.')
	if i < 0 || !api.ValidID(id[:i]) || strings.Trim(id[i+1:], "0123456789") != "" || i+1 == len(id) {
		return ""
	}
	return root + "/groups/" + id[:i] + "/jobs/" + id[i+1:]
}

const (
	activityOnPage = 50
	maxActor       = 256 // most bytes of the filter for an actor
)

// activityPage shows the activity log.
type activityPage struct {
	log httpapi.Activity // nil: there is none
}

// activityData is the data of the page of the activity log.
type activityData struct {
	Off      bool // there is no log
	Entries  []activityRow
	Actor    string
	Tenant   string
	Since    string // a day
	Scanned  int
	Next     string // path of the next page
	First    bool   // this is the first page
	Filtered bool
}

type activityRow struct {
	api.Activity
	Was, Is string // what the action changes, before and after it
}

func (p activityPage) view(r *http.Request) (view, error) {
	v := view{name: "activity", title: "Activity", data: activityData{Off: true}}
	if p.log == nil {
		return v, nil
	}
	q := r.URL.Query()
	query := activity.Query{Actor: strings.TrimSpace(q.Get("actor")), Limit: activityOnPage}
	var err error
	if query.Tenant, err = idOf(q, "tenant"); err != nil {
		return view{}, err
	}
	if query.Cursor, err = cursorOf(q); err != nil {
		return view{}, err
	}
	if query.Since, err = dayOf(q, "since"); err != nil {
		return view{}, err
	}
	switch {
	case len(query.Actor) > maxActor:
		return view{}, invalid("actor", "must be at most %d bytes", maxActor)
	case query.Cursor != "" && !activity.ValidCursor(query.Cursor):
		return view{}, invalid("cursor", "must be the cursor of an earlier page")
	}
	l, err := p.log.Read(r.Context(), query)
	if err != nil {
		return view{}, err
	}
	d := activityData{
		Actor: query.Actor, Tenant: query.Tenant, Since: q.Get("since"), Scanned: l.Scanned,
		First: query.Cursor == "", Next: nextPage(root+"/activity", q, l.Cursor),
		Filtered: query.Actor+query.Tenant != "" || !query.Since.IsZero(),
	}
	for _, e := range l.Activity {
		d.Entries = append(d.Entries, activityRow{e, shortened(string(e.Before)), shortened(string(e.After))})
	}
	v.data = d
	return v, nil
}

const (
	auditPartitions = 100 // most partitions that the page lists
	lostLetters     = 10  // newest jobs that have failed as LOST
	// lostInterval is how often, at most, an open audit page searches the dead letters for lost
	// jobs: a search may read many dead letters.
	lostInterval = 10 * time.Second
	codeLost     = "LOST"
)

// auditPage serves the page of the audit: what the watchers found when they last audited their
// partitions.
type auditPage struct{ backend httpapi.Backend }

type auditData struct {
	api.AuditState
	Laws       []quantity // with open violations, the most first
	Open       int64      // violations of all laws
	Unlisted   int64      // open violations that the list does not have
	Leaderless int        // partitions without a leader
	Unaudited  int        // partitions that were never looked at
	LookedAt   *time.Time // the oldest of the partitions' last checks; nil: a partition had none
	DeepAt     *time.Time // the oldest of their last full audits; nil: a partition had none
	Shown      []api.AuditedPartition
	More       int              // partitions that Shown leaves out
	Lost       []api.DeadLetter // the newest jobs that were ended as LOST
}

func (p auditPage) view(r *http.Request) (view, error) {
	data, err := p.reader()(r.Context())
	return view{name: "audit", title: "Audit", data: data, topic: "audit"}, err
}

func (p auditPage) open(_ context.Context, arg string) (func(context.Context) (any, error), error) {
	if arg != "" {
		return nil, api.ErrNotFound
	}
	return p.reader(), nil
}

// reader returns a function that reads the data of the page: the state of the audit on each call,
// and the dead letters of lost jobs at most once per lostInterval.
func (p auditPage) reader() func(context.Context) (any, error) {
	var lost []api.DeadLetter
	var readAt time.Time
	return func(ctx context.Context) (any, error) {
		state, err := p.backend.Audit(ctx)
		if err != nil {
			return nil, err
		}
		if time.Since(readAt) >= lostInterval {
			l, err := p.backend.DeadLetters(ctx, messages.DeadLetterQuery{Code: codeLost, Limit: lostLetters})
			if err != nil {
				return nil, err
			}
			for i := range l.DeadLetters {
				l.DeadLetters[i].Payload = nil // the page does not show it
			}
			lost, readAt = l.DeadLetters, time.Now()
		}
		d := auditData{AuditState: state, Lost: lost}
		d.summarize()
		return d, nil
	}
}

// openLaws returns the laws that have open violations, sorted by name, with their numbers; open is
// the sum.
func openLaws(a api.AuditState) (laws []quantity, open int64) {
	for _, law := range slices.Sorted(maps.Keys(a.ByLaw)) {
		if n := a.ByLaw[law]; n > 0 {
			laws = append(laws, quantity{Name: law, Number: n})
			open += n
		}
	}
	return laws, open
}

// summarize computes from the audit state what the page shows of all partitions together.
func (d *auditData) summarize() {
	d.Laws, d.Open = openLaws(d.AuditState)
	slices.SortStableFunc(d.Laws, func(a, b quantity) int { return cmp.Compare(b.Number, a.Number) })
	d.Unlisted = d.Open
	for _, v := range d.Violations {
		d.Unlisted -= max(v.Count, 1)
	}
	d.Unlisted = max(d.Unlisted, 0)
	d.LookedAt, d.DeepAt = oldest(d.Partitions, func(p api.AuditedPartition) *time.Time { return p.LookedAt }),
		oldest(d.Partitions, func(p api.AuditedPartition) *time.Time { return p.DeepAt })
	d.Shown = slices.Clone(d.Partitions)
	for _, p := range d.Shown {
		if p.Leader == "" {
			d.Leaderless++
		}
		if p.LookedAt == nil {
			d.Unaudited++
		}
	}
	slices.SortStableFunc(d.Shown, func(a, b api.AuditedPartition) int { // those that need a look first
		return cmp.Compare(urgency(a), urgency(b))
	})
	if len(d.Shown) > auditPartitions {
		d.More = len(d.Shown) - auditPartitions
		d.Shown = d.Shown[:auditPartitions]
	}
}

func urgency(p api.AuditedPartition) int {
	switch {
	case p.Leader == "":
		return 0
	case p.LookedAt == nil:
		return 1
	}
	return 2
}

// oldest returns the oldest of the times that `of` gives for the partitions. It returns nil if `of`
// gives nil for at least one partition, or if there are no partitions.
func oldest(all []api.AuditedPartition, of func(api.AuditedPartition) *time.Time) (found *time.Time) {
	for _, p := range all {
		at := of(p)
		if at == nil {
			return nil
		}
		if found == nil || at.Before(*found) {
			found = at
		}
	}
	return found
}
