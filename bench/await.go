package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

const (
	// pollInterval and followInterval are the pauses between two reads of groups from Redis.
	// Reading more often would slow down what is measured. The times of groups are exact all the
	// same: they are timestamps in the groups.
	pollInterval   = 20 * time.Millisecond
	followInterval = 50 * time.Millisecond
	// followGroups is the number of groups that a follower reads in one poll: reading a thousand
	// groups each time would distort the measurement. When more than half of the groups that were
	// read have ended, the next poll reads twice as many, up to followMostGroups.
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
	f.run.options.show(f.part, f.done, f.jobs)
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
	return round2((tenth - 1) / (b - a).Seconds()), round2(tenth / (d - c).Seconds())
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

// endListener reads the events stream, as any program can, and stores the events of groups that
// have ended.
type endListener struct {
	run    *run
	offset time.Duration // Redis's clock minus this process's clock
	pause  time.Duration // how long it waits after each read
	last   string        // id of the last event that was read
	stop   context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex
	ends map[string]groupEnd // by the group's id
	err  error
}

// groupEnd is the end of a group, as its event shows it.
type groupEnd struct {
	readAt    int64 // when the event was read, in µs by Redis's clock
	group     *api.Group
	published time.Time // of the event, by Redis's clock, in whole ms
}

// msUntil returns the ms from the acceptance of the group to the time started, which is in µs by
// Redis's clock.
func (e groupEnd) msUntil(started int64) float64 {
	return float64(started-e.group.Timestamps["created"].UnixMicro()) / 1000
}

// listenForEnds returns a listener that reads all events published from now on, until close is
// called. After each read it waits for pause, which saves CPU, so groupEnd.readAt can be late by
// this time.
func (r *run) listenForEnds(ctx context.Context, pause time.Duration) (*endListener, error) {
	newest, err := r.conn.Cmd.XRevRangeN(ctx, r.space.Events(), "+", "-", 1).Result()
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	last := "0"
	if len(newest) > 0 {
		last = newest[0].ID
	}
	return r.listenAfter(ctx, last, pause)
}

// listenAfter is like listenForEnds, for the events after the one with the id last.
func (r *run) listenAfter(ctx context.Context, last string, pause time.Duration) (*endListener, error) {
	e := &endListener{run: r, pause: pause, last: last, done: make(chan struct{}), ends: map[string]groupEnd{}}
	var err error
	if e.offset, err = r.clockOffset(ctx); err != nil {
		return nil, err
	}
	ctx, e.stop = context.WithCancel(ctx)
	go e.readEvents(ctx)
	return e, nil
}

func (e *endListener) close() {
	e.stop()
	<-e.done
}

func (e *endListener) readEvents(ctx context.Context) {
	defer close(e.done)
	for ctx.Err() == nil {
		args := &redis.XReadArgs{Streams: []string{e.run.space.Events(), e.last}, Block: redisx.MaxBlock, Count: 1000}
		read, err := e.run.conn.Block.XRead(ctx, args).Result()
		readAt := time.Now().Add(e.offset).UnixMicro()
		if errors.Is(err, redis.Nil) {
			continue
		}
		e.mu.Lock()
		if err == nil {
			err = e.record(read[0].Messages, readAt)
		}
		e.err = err
		e.mu.Unlock()
		if err != nil || redisx.Sleep(ctx, e.pause) != nil {
			return
		}
	}
}

// record stores the groups whose end is among the messages of the events stream. Of a group that
// ends twice, it stores the first end. It also sets e.last to the last id. The caller holds e.mu.
func (e *endListener) record(messages []redis.XMessage, readAt int64) error {
	for _, m := range messages {
		e.last = m.ID
		if !slices.Contains([]any{"group.completed", "group.failed", "group.cancelled"}, m.Values["type"]) {
			continue
		}
		var event api.Event
		data, _ := m.Values["data"].(string)
		err := json.Unmarshal([]byte(data), &event)
		if err == nil && event.Group == nil {
			err = errors.New("no group")
		}
		if err != nil {
			return fmt.Errorf("event %s: %w", m.ID, err)
		}
		if _, again := e.ends[event.Group.ID]; !again {
			at, _, _ := strings.Cut(m.ID, "-")
			ms, _ := strconv.ParseInt(at, 10, 64) // the id is Redis's
			e.ends[event.Group.ID] = groupEnd{readAt, event.Group, time.UnixMilli(ms)}
		}
	}
	return nil
}

// awaitCompleted waits until the listener has read that all these groups are COMPLETED, and returns
// their ends in the order of groups. It is an error if a group fails or is cancelled, a process or
// the listener has ended, or the first group that has not ended does not end for stallTimeout.
func (e *endListener) awaitCompleted(ctx context.Context, groups []group) (ends []groupEnd, err error) {
	err = e.run.await(ctx, fmt.Sprintf("events of %d groups", len(groups)), pollInterval, func() (int, error) {
		ends, err = e.completed(groups)
		return len(groups) - len(ends), err
	})
	return ends, err
}

// completed returns the ends of those groups at the beginning of the list that have all ended: it
// stops at the first group that has not. It is an error if one of them is not COMPLETED, or if the
// listener has failed.
func (e *endListener) completed(groups []group) ([]groupEnd, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return nil, fmt.Errorf("read events: %w", e.err)
	}
	out := make([]groupEnd, 0, len(groups))
	for _, want := range groups {
		end, ok := e.ends[want.id]
		if !ok {
			break
		}
		if g := end.group; g.Status != api.StatusCompleted {
			return nil, fmt.Errorf("await group %s: it is %s with %d failed jobs", g.ID, g.Status, g.Counts.Failed)
		}
		out = append(out, end)
	}
	return out, nil
}

// smallGroups returns n groups of size jobs each, not submitted yet. tenant returns the name of the
// i-th group's tenant, and job the JSON of the i-th job.
func smallGroups(name string, n, size int, tenant func(i int) string, job func(int) []byte) []group {
	groups := divideJobs(name, n*size, n, 1, job)
	for i := range groups {
		groups[i].tenant = tenant(i)
	}
	return groups
}

// named returns a function that returns the same name for each index.
func named(name string) func(int) string { return func(int) string { return name } }

// paceSenders is the number of goroutines of pace. There are several, so that a slow reply does not
// delay the next job.
const paceSenders = 8

// pace calls send for 0 to n-1, rate times a second, from paceSenders goroutines. due is the time
// planned for the call; a call is late if its goroutine still waits for an earlier one. The first
// error cancels the other calls; pace returns when all have returned.
func pace(ctx context.Context, rate, n int, send func(ctx context.Context, i int, due time.Time) error) error {
	senders, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for p := range paceSenders {
		senders.Go(func() error {
			for i := p; i < n; i += paceSenders {
				due := began.Add(time.Duration(i) * time.Second / time.Duration(rate))
				if err := redisx.Sleep(ctx, time.Until(due)); err != nil {
					return err
				}
				if err := send(ctx, i, due); err != nil {
					return fmt.Errorf("send single jobs: %w", err)
				}
			}
			return nil
		})
	}
	return senders.Wait()
}
