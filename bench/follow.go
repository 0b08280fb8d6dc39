package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

const (
	followInterval = 50 * time.Millisecond
	// followGroups is the number of groups that are read at a time. Reading a thousand groups each
	// time would distort the measurement. When more than half of those that were read have ended,
	// twice as many are read next time, up to followMostGroups; otherwise followGroups again.
	followGroups     = 64
	followMostGroups = 64 * followGroups
)

// groupFollower waits for the end of groups with few reads, so that waiting does not distort the
// measurement. The time of the end is taken from the groups.
type groupFollower struct {
	fleet    *Fleet
	space    keyspace.Space
	progress func(done int)

	open     []group
	pollsAll bool           // all open groups are read each time
	pollNext int            // number of groups that the next poll reads
	done     map[string]int // jobs done, by group id
	total    int            // sum of done
	end      int64          // latest time at which a group was COMPLETED, in ms by Redis's clock
	movedAt  time.Time      // when total grew last
	began    time.Time
	samples  []sample // taken only if pollsAll
}

// sample is the number of jobs that were done at a time after the start.
type sample struct {
	at   time.Duration
	done int
}

func follow(f *Fleet, space keyspace.Space, groups []group, progress func(int)) *groupFollower {
	now := time.Now()
	open := slices.DeleteFunc(slices.Clone(groups), func(g group) bool { return g.jobs == 0 })
	return &groupFollower{
		fleet:    f,
		space:    space,
		progress: progress,
		began:    now,
		movedAt:  now,
		samples:  []sample{{}},
		done:     map[string]int{},
		open:     open,
		pollsAll: len(open) <= followGroups,
		pollNext: followGroups,
	}
}

// wait waits until all groups are COMPLETED and, unless the channel producing is nil, until it has
// received the producer's result. It is an error if the producer fails, a group ends in another
// way, a process has ended, or no job becomes done for stallTimeout.
func (f *groupFollower) wait(ctx context.Context, producing <-chan error) error {
	for n := 1; len(f.open) > 0; n++ {
		select {
		case err := <-producing:
			if err != nil {
				return err
			}
			producing = nil
		default:
		}
		if err := redisx.Sleep(ctx, followInterval); err != nil {
			return err
		}
		if err := f.poll(ctx); err != nil {
			return err
		}
		if time.Since(f.movedAt) > stallTimeout {
			return fmt.Errorf("await %d groups, %s among them: %d jobs done, no progress for %s",
				len(f.open), f.open[0].id, f.total, stallTimeout)
		}
		if n%20 == 0 {
			if err := f.fleet.Check(); err != nil {
				return err
			}
		}
	}
	if producing != nil {
		return <-producing
	}
	return nil
}

// poll reads some of the open groups. Those that have not ended go to the end of the list.
func (f *groupFollower) poll(ctx context.Context) error {
	n := min(len(f.open), f.pollNext)
	polled := f.open[:n]
	at := time.Since(f.began)
	now, err := readProgress(ctx, f.fleet, f.space, polled)
	if err != nil {
		return fmt.Errorf("await the end: %w", err)
	}
	before := f.total
	left := slices.Clone(f.open[n:])
	for i, g := range polled {
		progress := now[i]
		done := int(progress.Counts.Done)
		f.total += done - f.done[g.id]
		f.done[g.id] = done
		switch status := progress.Status; {
		case status == api.StatusCompleted && done == g.jobs:
			f.end = max(f.end, progress.Completed.UnixMilli())
		case status.Ended():
			return fmt.Errorf("await group %s: it is %s with %d jobs done of %d, %d failed",
				g.id, status, done, g.jobs, progress.Counts.Failed)
		default:
			left = append(left, g)
		}
	}
	if ended := len(f.open) - len(left); ended > n/2 {
		f.pollNext = min(2*f.pollNext, followMostGroups)
	} else {
		f.pollNext = followGroups
	}
	f.open = left
	if f.total != before {
		f.movedAt = time.Now()
	}
	if f.pollsAll {
		f.samples = append(f.samples, sample{at, f.total})
	}
	if f.progress != nil {
		f.progress(f.total)
	}
	return nil
}

// tenthSpeeds returns the jobs a second of the first and the last tenth of all jobs. The first
// tenth begins when the first job is done. Both speeds are 0 if the samples do not cover all jobs.
func tenthSpeeds(samples []sample, jobs int) (first, last float64) {
	a, b, c, d := reachedAt(samples, 1), reachedAt(samples, jobs/10),
		reachedAt(samples, jobs-jobs/10), reachedAt(samples, jobs)
	if a < 0 || b <= a || d <= c {
		return 0, 0
	}
	tenth := float64(jobs / 10)
	return round2((tenth - 1) / (b - a).Seconds()), round2(tenth / (d - c).Seconds())
}

// reachedAt returns the time at which this number of jobs was done, by linear interpolation between
// samples; -1 if it was never reached.
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
