package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// foundJob is something of a job in a place that groups share.
type foundJob struct {
	kind        locationKind
	key, id     string // where: the entry, or the blob in a sorted set
	group       string
	ordinal     int64
	attempt     int
	typ, tenant string // "" where the place does not tell
	fault       string // what is wrong with it whatever its group says
}

// checkUntracked asks about items of groups that are not kept, and of jobs beyond what is kept.
// First all are asked about, then those that disagree once more together with whether they still
// lie there: then they are wrong at one instant.
func (ps *pass) checkUntracked(ctx context.Context, jobs []foundJob) error {
	if ps.opts.only != nil {
		return nil // it is of other groups
	}
	var candidates []foundJob
	for page := range slices.Chunk(jobs, pageSize/2) {
		replies := make([]jobReplies, len(page))
		err := ps.pipeline(ctx, func(p redis.Pipeliner) {
			for i, j := range page {
				replies[i] = ps.queryJob(ctx, p, j)
			}
		})
		if err != nil {
			return err
		}
		for i, j := range page {
			if j.faultBy(replies[i]) != "" {
				candidates = append(candidates, j)
			}
		}
	}
	for page := range slices.Chunk(candidates, 50) {
		replies, present := make([]jobReplies, len(page)), make([]func() bool, len(page))
		err := ps.transaction(ctx, func(p redis.Pipeliner) {
			for i, j := range page {
				replies[i] = ps.queryJob(ctx, p, j)
				if j.kind == atNonReady {
					score := p.ZScore(ctx, j.key, j.id)
					present[i] = func() bool { return score.Err() == nil }
				} else {
					entry := p.XRange(ctx, j.key, j.id, j.id)
					present[i] = func() bool { return len(entry.Val()) > 0 }
				}
			}
		})
		if err != nil {
			return err
		}
		for i, j := range page {
			if fault := j.faultBy(replies[i]); fault != "" && present[i]() {
				ps.reportMisplaced(j, fault)
			}
		}
	}
	return nil
}

// jobReplies are what Redis says of an item's job.
type jobReplies struct {
	group *redis.SliceCmd
	state *redis.StringCmd
}

func (ps *pass) queryJob(ctx context.Context, p redis.Pipeliner, j foundJob) jobReplies {
	at := 2 * min(j.ordinal, messages.MaxTotal)
	return jobReplies{
		group: p.HMGet(ctx, ps.p.Group(j.group), "tenant", "status", "sweep"),
		state: p.GetRange(ctx, ps.p.States(j.group), at, at+1),
	}
}

// faultBy says what is wrong with an item, "" when nothing is.
func (j foundJob) faultBy(a jobReplies) string {
	if isWrongType(a.group.Err()) || isWrongType(a.state.Err()) {
		return "" // its group can't be judged
	}
	v, state := a.group.Val(), ledger.State(a.state.Val())
	tenant, status, sweeping := asText(v[0]), asText(v[1]), asText(v[2]) != ""
	switch {
	case status == "":
		return "there is no such group"
	case len(state) != ledger.StateBytes:
		return "the group has no such job"
	case j.fault != "":
		return j.fault
	case j.tenant != "" && j.tenant != tenant:
		return "its tenant is " + tenant
	case fits(j.kind, state, j.attempt):
		return ""
	case status == string(api.StatusCancelled) && j.mayRemain(state.Letter(), sweeping):
		return ""
	}
	return "it is " + describeState(state)
}

// mayRemain says whether a cancelled group may have left an item: parked ones until it is settled,
// ready ones until a worker or the dispatcher meets them.
func (j foundJob) mayRemain(letter ledger.Letter, sweeping bool) bool {
	switch j.kind {
	case atNonReady:
		return letter == ledger.Cancelled && sweeping
	case atReady:
		return letter == ledger.Cancelled
	}
	return false
}

func (ps *pass) reportMisplaced(j foundJob, fault string) {
	where := ps.shortKey(j.key)
	if j.kind != atNonReady { // what lies there holds its payload
		where += " under " + j.id
	}
	f := finding{j.kind.law(), j.group, j.ordinal, fmt.Sprint("untracked ", j.key, j.id, fault)}
	ps.found.add(f, "something of it lies in %s, but %s", where, fault)
	ps.addRepair(f, ps.misplacedRepair(job{j.group, j.ordinal}, ps.locationOfKey(j.kind, j.key)))
	ps.markUncertain(j.kind.law(), j.tenant, j.typ)
}
