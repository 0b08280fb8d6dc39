package console

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

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

// auditData is the data of the page of the audit.
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
			l, err := p.backend.DeadLetters(ctx, httpapi.DeadLetterQuery{Code: codeLost, Limit: lostLetters})
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
		return cmp.Compare(healthOf(a), healthOf(b))
	})
	if len(d.Shown) > auditPartitions {
		d.More = len(d.Shown) - auditPartitions
		d.Shown = d.Shown[:auditPartitions]
	}
}

func healthOf(p api.AuditedPartition) int {
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
