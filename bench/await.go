package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

const (
	// pollInterval and followInterval are the pauses between two reads of groups from Redis.
	// Reading more often would slow down what is measured. The pauses do not make the times of
	// groups less exact: these are timestamps in the groups. awaitAccepted reads more often.
	pollInterval   = 20 * time.Millisecond
	followInterval = 50 * time.Millisecond
	// followGroups is the number of groups that a follower reads in one poll: reading a thousand
	// groups each time would distort the measurement. When more than half of the groups that were
	// read have ended, the next poll reads twice as many, up to followMostGroups; otherwise
	// followGroups again.
	followGroups     = 64
	followMostGroups = 64 * followGroups
)

// groupState is a submitted group with its progress as Redis shows it. The progress of a group that
// does not exist is zero.
type groupState struct {
	group
	ledger.Progress
}

// seconds returns the time from the group's acceptance to COMPLETED.
func (g groupState) seconds() float64 { return g.Completed.Sub(g.Created).Seconds() }

// states reads how far groups are, in one round trip.
func (r *run) states(ctx context.Context, groups []group) ([]groupState, error) {
	refs := make([]ledger.GroupRef, len(groups))
	for i, g := range groups {
		refs[i] = ledger.GroupRef{Partition: r.space.OfTenant(g.tenant), ID: g.id}
	}
	all, err := ledger.ReadProgress(ctx, r.conn.Cmd, refs)
	out := make([]groupState, len(all))
	for i, p := range all {
		out[i] = groupState{groups[i], p}
	}
	return out, err
}

// awaitAccepted waits until all jobs of the groups are accepted, and returns Redis's time at that
// moment (µs).
func (r *run) awaitAccepted(ctx context.Context, groups ...group) (int64, error) {
	err := r.await(ctx, "jobs to be accepted", pollInterval/4, func() (left int, err error) {
		now, err := r.states(ctx, groups)
		for _, g := range now {
			left += g.jobs - int(g.Counts.Accepted)
		}
		return left, err
	})
	if err != nil {
		return 0, err
	}
	t, err := r.now(ctx)
	return t.UnixMicro(), err
}

// awaitDone waits until groups are COMPLETED with all jobs done but group.fails, and returns their
// states in the order of groups. part names the wait in the progress; "": no progress. For errors
// see [follower.wait].
func (r *run) awaitDone(ctx context.Context, part string, groups []group) ([]groupState, error) {
	f := r.follow(part, groups)
	f.interval = pollInterval
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	out := make([]groupState, len(groups))
	for i, g := range groups {
		out[i] = f.seen[g.id]
	}
	return out, nil
}

// follower waits until groups have ended, with few reads, so that waiting does not distort the
// measurement. It takes the times at which groups ended from the groups themselves.
type follower struct {
	run      *run
	part     string
	interval time.Duration

	jobs     int // of all groups, that are to be done
	open     []group
	pollsAll bool                  // all open groups are read each time
	pollNext int                   // number of groups that the next poll reads
	seen     map[string]groupState // last state of each group, by id
	done     int                   // jobs done
	end      time.Time             // latest time at which a group was COMPLETED, by Redis's clock
	began    time.Time
	samples  []sample // taken only if pollsAll
}

// sample says how many jobs were done at a time since the follower began.
type sample struct {
	at   time.Duration
	done int
}

func (r *run) follow(part string, groups []group) *follower {
	f := &follower{
		run: r, part: part, interval: followInterval, open: slices.Clone(groups), pollNext: followGroups,
		pollsAll: len(groups) <= followGroups, seen: map[string]groupState{},
		began: time.Now(), samples: []sample{{}},
	}
	for _, g := range groups {
		f.jobs += g.jobs - g.fails
	}
	f.open = slices.DeleteFunc(f.open, func(g group) bool { return g.jobs == 0 })
	return f
}

// wait waits until all groups are COMPLETED with all jobs done but group.fails. It is an error if a
// group ends in another way, a process has ended, or for stallTimeout no job becomes done and no
// group ends.
func (f *follower) wait(ctx context.Context) error {
	if len(f.open) == 0 {
		return nil
	}
	what := fmt.Sprintf("%d groups, %s the first of them", len(f.open), f.open[0].id)
	return f.run.await(ctx, what, f.interval, func() (int, error) {
		err := f.poll(ctx)
		return len(f.open) + f.jobs - f.done, err
	})
}

// waitBeside runs produce, which publishes the groups' jobs, and waits for the groups' end at the
// same time. The first error of either cancels the other.
func (f *follower) waitBeside(ctx context.Context, produce func(context.Context) error) error {
	both, ctx := errgroup.WithContext(ctx)
	both.Go(func() error { return produce(ctx) })
	both.Go(func() error { return f.wait(ctx) })
	return both.Wait()
}

// poll reads the first groups in the follower's list of open groups. It removes those that have
// ended, and puts the others at the end of the list.
func (f *follower) poll(ctx context.Context) error {
	n := min(len(f.open), f.pollNext)
	at := time.Since(f.began)
	now, err := f.run.states(ctx, f.open[:n])
	if err != nil {
		return fmt.Errorf("await the end: %w", err)
	}
	left := slices.Clone(f.open[n:])
	for _, g := range now {
		done := int(g.Counts.Done)
		f.done += done - int(f.seen[g.id].Counts.Done)
		f.seen[g.id] = g
		switch {
		case g.Status == api.StatusCompleted && done == g.jobs-g.fails:
			if g.Completed.After(f.end) {
				f.end = g.Completed
			}
		case g.Status.Ended():
			return fmt.Errorf("await group %s: it is %s with %d jobs done of %d, %d failed",
				g.id, g.Status, done, g.jobs, g.Counts.Failed)
		default:
			left = append(left, g.group)
		}
	}
	if ended := len(f.open) - len(left); ended > n/2 {
		f.pollNext = min(2*f.pollNext, followMostGroups)
	} else {
		f.pollNext = followGroups
	}
	f.open = left
	if f.pollsAll {
		f.samples = append(f.samples, sample{at, f.done})
	}
	f.run.options.progress(f.part, f.done, f.jobs)
	return nil
}

// tenthSpeeds returns the jobs a second at which the first tenth of all jobs became done, and the
// last tenth. The first tenth begins when the first job is done. Both speeds are 0 if the samples
// do not cover all jobs, or with fewer than 20 jobs.
func tenthSpeeds(samples []sample, jobs int) (first, last float64) {
	a, b, c, d := reachedAt(samples, 1), reachedAt(samples, jobs/10),
		reachedAt(samples, jobs-jobs/10), reachedAt(samples, jobs)
	if a < 0 || b <= a || d <= c {
		return 0, 0
	}
	tenth := float64(jobs / 10)
	return measure.Round2((tenth - 1) / (b - a).Seconds()), measure.Round2(tenth / (d - c).Seconds())
}

// reachedAt returns the time since the start at which `done` jobs were done, by linear
// interpolation between samples; -1 if the run ended with fewer jobs done.
func reachedAt(samples []sample, done int) time.Duration {
	for i := 1; i < len(samples); i++ {
		before, after := samples[i-1], samples[i]
		if after.done < done {
			continue
		}
		part := float64(done-before.done) / float64(after.done-before.done)
		return before.at + time.Duration(part*float64(after.at-before.at))
	}
	return -1
}
