package audit

import (
	"context"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// unknownJob is an ordinal at a location of a group whose states, as first read, don't contain it.
type unknownJob struct {
	kind    locationKind
	ordinal int64
}

// checkOwnLocations compares the locations that belong to one group (queues, failures, result
// lines) with its states. If something looks wrong, the states are read again, and only jobs that
// have not moved and ordinals that still don't exist are reported.
func (ps *pass) checkOwnLocations(ctx context.Context, g *group) error {
	index := &locationIndex{states: g.states, cancelled: g.status() == string(api.StatusCancelled)}
	var unknown []unknownJob
	own := ps.judgedOwnKinds(g)
	err := ps.readOwnLocations(ctx, g, own, func(kind locationKind, ordinal int64, attempt int) {
		if index.state(ordinal) != "" {
			index.record(kind, ordinal, attempt)
		} else if len(unknown) < maxPerGroupAndLaw {
			unknown = append(unknown, unknownJob{kind, ordinal})
		}
	})
	if err != nil {
		return err
	}
	covers := func(kind locationKind) bool { return own[kind] }
	suspicious := len(unknown) > 0
	index.eachProblem(index.states, covers, func(problem) bool {
		suspicious = true
		return false
	})
	if !suspicious {
		return nil
	}

	var hash *redis.SliceCmd
	var states *redis.StringCmd
	err = ps.Transaction(ctx, func(p redis.Pipeliner) {
		hash, states = p.HMGet(ctx, ps.p.Group(g.id), "at:created", "status", "results_expired"),
			p.Get(ctx, ps.p.States(g.id))
	})
	if err != nil {
		return err
	}
	v, now := hash.Val(), states.Val()
	if read.Text(v[0]) != g.hash["at:created"] {
		return nil // the group was deleted, or created again
	}
	own[atGroupResults] = own[atGroupResults] && read.Text(v[2]) == ""
	index.cancelled = index.cancelled || read.Text(v[1]) == string(api.StatusCancelled)
	index.eachProblem(now, covers, func(p problem) bool {
		// Cancelling a group deletes its queues at once.
		if p.kind != atQueue || p.fault != "missing" || !index.cancelled {
			ps.reportJob(g.id, g.tenant, g.types, p)
		}
		return true
	})
	for _, u := range unknown {
		if u.ordinal >= int64(len(now)/2) {
			f := finding{u.kind.law(), g.id, u.ordinal, fmt.Sprint("unknown ", u.kind)}
			ps.found.add(f, "something of it lies in %s, but the group has no such job", kindNames[u.kind])
			// If the states are too short, the states may be wrong and not the job: repair nothing.
			if u.kind != atGroupResults && int64(len(now)) == 2*g.intField("accepted") {
				ps.addMisplaced(f, Job{g.id, u.ordinal},
					ps.locationsOf(u.kind, g.id, g.tenant, u.ordinal, g.types)...)
			}
			ps.markUncertain(u.kind.law(), g.tenant, g.types...)
		}
	}
	return nil
}

// readOwnLocations reads those of the group's own locations that own selects, and calls find for
// each job in them. A full audit always reads the result lines (in results:GROUP), even if own does
// not select them; a pass over candidates never does. An unreadable element is reported.
func (ps *pass) readOwnLocations(
	ctx context.Context, g *group, own [locationKinds]bool, find func(kind locationKind, ordinal int64, attempt int),
) error {
	unreadable := func(kind locationKind) {
		ps.reportGroup(g, kind.law(), fmt.Sprint("unreadable ", kind), "something in %s can't be read", kindNames[kind])
		f := finding{kind.law(), g.id, noOrdinal, fmt.Sprint("unreadable ", kind)}
		switch kind {
		case atQueue:
			ps.addMisplaced(f, Job{}, ps.locationsOf(kind, g.id, g.tenant, 0, g.types)...)
		case atFailures:
			ps.addMisplaced(f, Job{}, Location{"failures", g.id, ""})
		}
	}
	for i, typ := range g.types {
		if !own[atQueue] {
			break
		}
		err := ps.ReadQueue(ctx, ps.p.Queue(g.id, typ), g.queues[i], func(blob string) {
			if ordinal, ok := ledger.QueuedOrdinal(blob); ok {
				find(atQueue, ordinal, unknownAttempt)
			} else {
				unreadable(atQueue)
			}
		})
		if err != nil {
			return err
		}
	}
	if own[atFailures] && g.failures > 0 {
		command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
			return p.HScan(ctx, ps.p.Failures(g.id), cursor, "", read.PageSize)
		}
		seen := bitset(nil) // a scan may yield the same field of a hash twice
		err := ps.Scan(ctx, command, func(page []string) error {
			for i := 0; i+1 < len(page); i += 2 {
				ordinal, attempt, ok := read.ParseFailure(g.id, page[i], page[i+1])
				switch {
				case !ok:
					unreadable(atFailures)
				case ordinal >= int64(len(g.states)/2):
					find(atFailures, ordinal, attempt)
				case !seen.has(ordinal):
					seen.set(ordinal, int64(len(g.states)/2))
					find(atFailures, ordinal, attempt)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if ps.opts.only != nil {
		return nil
	}
	return ps.ReadList(ctx, ps.p.Results(g.id), g.resultChunks, func(chunk string) {
		for line := range strings.SplitSeq(chunk, "\n") {
			if ordinal, ok := read.ParseResultLine(line); ok {
				find(atGroupResults, ordinal, unknownAttempt)
			} else {
				unreadable(atGroupResults)
			}
		}
	})
}
