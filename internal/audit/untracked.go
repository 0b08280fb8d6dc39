package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// foundJob is a job as a shared location holds it.
type foundJob struct {
	kind        locationKind
	key, id     string // the location's key, and the entry id or (in a sorted set) the member in it
	group       string
	ordinal     int64
	attempt     int
	typ, tenant string // "" if the location doesn't say it
	fault       string // what is wrong with the job at this location, whatever its state is; "" for nothing
}

// checkUntracked checks found jobs whose states the pass does not keep: it asks Redis about each of
// them. If one seems wrong, it is asked about again, in one transaction with whether it is still
// there, so that the job and its location belong to one instant. What is then still wrong is
// reported. A pass over candidates checks none.
func (ps *pass) checkUntracked(ctx context.Context, jobs []foundJob) error {
	if ps.opts.only != nil {
		return nil // a pass over candidates doesn't judge other groups
	}
	var candidates []foundJob
	for page := range slices.Chunk(jobs, read.PageSize/2) {
		replies := make([]jobReplies, len(page))
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
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
		err := ps.Transaction(ctx, func(p redis.Pipeliner) {
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

// jobReplies holds Redis's replies about a found job: fields of its group, and its state.
type jobReplies struct {
	group *redis.SliceCmd
	state *redis.StringCmd
}

// queryJob asks about the group and the state of a found job.
func (ps *pass) queryJob(ctx context.Context, p redis.Pipeliner, j foundJob) jobReplies {
	at := 2 * min(j.ordinal, messages.MaxTotal)
	return jobReplies{
		group: p.HMGet(ctx, ps.p.Group(j.group), "tenant", "status", "sweep"),
		state: p.GetRange(ctx, ps.p.States(j.group), at, at+1),
	}
}

// faultBy returns what is wrong with a found job according to these replies; "" for nothing.
func (j foundJob) faultBy(replies jobReplies) string {
	if read.IsWrongType(replies.group.Err()) || read.IsWrongType(replies.state.Err()) {
		return "" // a group with a key of the wrong type is not judged
	}
	v, state := replies.group.Val(), ledger.State(replies.state.Val())
	tenant, status, sweeping := read.Text(v[0]), read.Text(v[1]), read.Text(v[2]) != ""
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
	return "it is " + DescribeState(state)
}

// mayRemain reports whether a cancelled job may be at this location: in the non-ready set until the
// group's cancellation is completed, in the ready stream until a worker or the dispatcher reads it.
func (j foundJob) mayRemain(letter ledger.Letter, sweeping bool) bool {
	switch j.kind {
	case atNonReady:
		return letter == ledger.Cancelled && sweeping
	case atReady:
		return letter == ledger.Cancelled
	}
	return false
}

// reportMisplaced reports a found job that is wrong at its location.
func (ps *pass) reportMisplaced(j foundJob, fault string) {
	where := ps.shortKey(j.key)
	if j.kind != atNonReady { // a member of a sorted set contains the payload: don't report it
		where += " under " + j.id
	}
	f := finding{j.kind.law(), j.group, j.ordinal, fmt.Sprint("untracked ", j.key, j.id, fault)}
	ps.found.add(f, "something of it lies in %s, but %s", where, fault)
	ps.addMisplaced(f, Job{j.group, j.ordinal}, ps.locationOfKey(j.kind, j.key))
	ps.markUncertain(j.kind.law(), j.tenant, j.typ)
}
