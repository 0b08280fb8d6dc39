package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// foundJob is a job as a shared location holds it.
type foundJob struct {
	read.Element
	at   read.Location
	kind locationKind
	// entry is the id of the job's entry in a stream. It is "" for a member of a sorted set, which
	// contains the payload and must not be reported.
	entry  string
	tenant string // whose location it is; "" if the location is of no tenant
	fault  string // what is wrong with the job at this location, whatever its state is; "" for nothing
}

func newFoundJob(e read.Element, at read.Location) foundJob {
	j := foundJob{Element: e, at: at, kind: kindOf[at.Name], entry: e.ID}
	if j.kind == atNonReady {
		j.entry, j.tenant = "", at.Owner
	}
	if j.kind == atReady && e.Type != at.Owner {
		j.fault = "of type " + e.Type
	}
	return j
}

// checkUntracked checks found jobs whose states the pass does not keep: it asks Redis for the state
// of each. If a job seems wrong, it asks again, for the state and the job's presence at the
// location in one transaction, so that both are of one instant. It reports the jobs that are wrong
// then too. A pass over candidates checks none of them.
func (sl *sharedLocations) checkUntracked(ctx context.Context, jobs []foundJob) error {
	if !sl.full() {
		return nil
	}
	ask := func(p redis.Pipeliner, j foundJob) jobReplies { return sl.queueJob(ctx, p, j) }
	replies, err := read.Ask(ctx, sl.Pipeline, read.PageSize/2, jobs, ask)
	if err != nil {
		return err
	}
	var candidates []foundJob
	for i, j := range jobs {
		if j.faultBy(replies[i]) != "" {
			candidates = append(candidates, j)
		}
	}
	for page := range slices.Chunk(candidates, 50) {
		present := make(map[foundJob]func() bool, len(page))
		replies, err := read.Ask(ctx, sl.Transaction, len(page), page, func(p redis.Pipeliner, j foundJob) jobReplies {
			present[j] = sl.queuePresence(ctx, p, j)
			return ask(p, j)
		})
		if err != nil {
			return err
		}
		for i, j := range page {
			if fault := j.faultBy(replies[i]); fault != "" && present[j]() {
				sl.reportMisplaced(j, fault)
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

// queueJob adds to a pipeline the commands that read the group and the state of a found job.
func (sl *sharedLocations) queueJob(ctx context.Context, p redis.Pipeliner, j foundJob) jobReplies {
	from := ledger.StateBytes * min(j.Ordinal, messages.MaxTotal)
	return jobReplies{
		group: p.HMGet(ctx, sl.p.Group(j.Group), "tenant", "status", "sweep"),
		state: p.GetRange(ctx, sl.p.States(j.Group), from, from+ledger.StateBytes-1),
	}
}

// queuePresence adds to a pipeline the command that tells whether a found job is still at its
// location. The returned function returns the answer.
func (sl *sharedLocations) queuePresence(ctx context.Context, p redis.Pipeliner, j foundJob) func() bool {
	if j.kind == atNonReady {
		score := p.ZScore(ctx, j.at.Key(sl.p), j.ID)
		return func() bool { return score.Err() == nil }
	}
	entry := p.XRange(ctx, j.at.Key(sl.p), j.ID, j.ID)
	return func() bool { return len(entry.Val()) > 0 }
}

// faultBy returns what is wrong with a found job according to these replies of Redis; "" for
// nothing.
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
	case fits(j.kind, state, j.Attempt):
		return ""
	case status == string(api.StatusCancelled) && j.mayRemain(state.Letter(), sweeping):
		return ""
	}
	return "it is " + DescribeState(state)
}

// mayRemain reports whether a cancelled job may be at this location: in the non-ready set until the
// group's cancellation is completed, in the ready stream until a worker or the dispatcher reads it.
func (j foundJob) mayRemain(letter ledger.Letter, sweeping bool) bool {
	return letter == ledger.Cancelled && (j.kind == atReady || j.kind == atNonReady && sweeping)
}

// reportMisplaced reports that a found job does not belong at its location, for the reason in
// fault. The repair quarantines it.
func (sl *sharedLocations) reportMisplaced(j foundJob, fault string) {
	key := j.at.Key(sl.p)
	where := sl.shortKey(key)
	if j.entry != "" {
		where += " under " + j.entry
	}
	sl.found.add(newFinding(j.kind.law(), j.Group, j.tenant, fmt.Sprint("untracked ", key, j.ID, fault),
		"something of it lies in %s, but %s", where, fault).aboutJob(j.Ordinal).quarantinedAt(j.at), j.Type)
}
