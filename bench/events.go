package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/journal"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

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
	readAt int64 // when the event was read, in µs by Redis's clock
	group  *api.Group
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
	e := &endListener{run: r, pause: pause, last: "0", done: make(chan struct{}), ends: map[string]groupEnd{}}
	var err error
	if e.offset, err = r.clockOffset(ctx); err != nil {
		return nil, err
	}
	newest, err := r.conn.Cmd.XRevRangeN(ctx, r.space.Events(), "+", "-", 1).Result()
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	if len(newest) > 0 {
		e.last = newest[0].ID
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
			e.ends[event.Group.ID] = groupEnd{readAt, event.Group}
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

// singleJobs returns n groups of one job each, not submitted yet. tenant returns the name of the
// i-th group's tenant, and job the JSON of the i-th job.
func singleJobs(name string, n int, tenant func(i int) string, job func(int) []byte) []group {
	groups := divideJobs(name, n, n, 1, job)
	for i := range groups {
		groups[i].tenant = tenant(i)
	}
	return groups
}

// named returns a function that returns the same name for each index.
func named(name string) func(int) string { return func(int) string { return name } }

// publishSingle publishes a group with all of its jobs in one message to the ingest stream. from is
// the index of its first job in the load.
func (p publisher) publishSingle(ctx context.Context, g group, from int) error {
	data, err := g.complete(from)
	if err != nil {
		return err
	}
	pipe := p.pipeline()
	if err := pipe.add(ctx, "group.submit", data); err != nil {
		return err
	}
	return pipe.flush(ctx)
}

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

// firstStarts returns, by group id, the time at which the first job of the group started, in µs by
// Redis's clock.
func firstStarts(log journal.Log) map[string]int64 {
	started := map[string]int64{}
	for _, s := range log.Starts { // ordered by time
		if _, again := started[s.Group]; !again {
			started[s.Group] = s.At
		}
	}
	return started
}
