package audit

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// ownLocations is the check of one group: it compares the locations that belong only to this group
// (queues, failures, result lines) with the group's states.
type ownLocations struct {
	*scope
	*group
	whole   trackedGroup // the group with all its states
	judged  kindSet
	unknown []problem // jobs that the states, as first read, don't contain
}

// newOwnLocations returns the check of a group's own locations. A pass over candidates judges the
// queues only if their length differs from the number of waiting jobs, the failures only if it
// differs from that of failed jobs, and result lines not at all.
func newOwnLocations(s *scope, g *group) *ownLocations {
	o, full := &ownLocations{scope: s, group: g, whole: g.tracked(0, g.States)}, s.full()
	o.whole.index.cancelled = g.status() == string(api.StatusCancelled)
	o.judged[atQueue] = full || g.Queued() != g.jobs[ledger.Waiting]
	o.judged[atFailures] = full || g.Failures != g.jobs[ledger.Failed]
	o.judged[atGroupResults] = full && g.Fields["results_expired"] == ""
	return o
}

// check reads the group's own locations. If something looks wrong, it reads the states again, and
// reports only jobs whose state has not changed and ordinals that still don't exist.
func (o *ownLocations) check(ctx context.Context) error {
	if err := o.readAll(ctx); err != nil {
		return err
	}
	suspicious := len(o.unknown) > 0
	for range o.whole.index.problems(o.States, o.judged) {
		suspicious = true
		break
	}
	if !suspicious {
		return nil
	}
	var again func() reading
	err := o.Transaction(ctx, func(p redis.Pipeliner) { again = o.queueReading(ctx, p, o.ID, 0, -1) })
	if err != nil {
		return err
	}
	now := again()
	o.judged[atGroupResults] = o.judged[atGroupResults] && !now.expired
	o.reportProblems(&o.whole, now, o.judged)
	bytes := int64(len(now.states))
	for _, p := range o.unknown {
		if p.ordinal >= bytes/ledger.StateBytes && now.created == o.whole.created {
			o.reportJob(o.Header, p, bytes != ledger.StateBytes*o.Int("accepted"))
		}
	}
	return nil
}

// readAll reads the judged locations. A full audit always reads the result lines, even if they are
// not judged; a pass over candidates never does.
func (o *ownLocations) readAll(ctx context.Context) error {
	if o.judged[atQueue] {
		for i, at := range o.locationsOf(atQueue, o.Header, "") {
			if err := o.read(ctx, at, o.Queues[i]); err != nil {
				return err
			}
		}
	}
	if o.judged[atFailures] && o.Failures > 0 {
		if err := o.read(ctx, read.Location{Name: read.Failures, Owner: o.ID}, 0); err != nil {
			return err
		}
	}
	if !o.full() {
		return nil
	}
	return o.read(ctx, read.Location{Name: read.ResultLines, Owner: o.ID}, o.ResultChunks)
}

// read reads one location and records its jobs in the index. It reports unreadable elements. n is
// the length of a list; 0 for other types.
func (o *ownLocations) read(ctx context.Context, at read.Location, n int64) error {
	kind := kindOf[at.Name]
	seen := bitset(nil) // a scan may yield the same field of a hash twice
	return o.Elements(ctx, o.p, at, n, func(e read.Element) error {
		switch {
		case !e.Readable:
			f := newFinding(kind.law(), o.ID, o.Tenant, fmt.Sprint("unreadable ", kind),
				"something in %s can't be read", kindNames[kind])
			if kind != atGroupResults {
				f = f.quarantinedAt(o.locationsOf(kind, o.Header, "")...)
			}
			o.found.add(f, o.TypeList()...)
		case o.whole.index.state(e.Ordinal) == "":
			if len(o.unknown) < maxPerGroupAndLaw {
				o.unknown = append(o.unknown, problem{ordinal: e.Ordinal, kind: kind, fault: unknown})
			}
		case kind != atFailures:
			o.whole.index.record(kind, e.Ordinal, e.Attempt)
		case !seen.has(e.Ordinal):
			seen.set(e.Ordinal, o.size())
			o.whole.index.record(kind, e.Ordinal, e.Attempt)
		}
		return nil
	})
}
