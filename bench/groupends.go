package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// endListener reads the events stream, as any producer can, and keeps the events of groups that
// have ended.
type endListener struct {
	run    *fleetRun
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

// msUntil returns the ms from the acceptance of the group to started (µs by Redis's clock).
func (e groupEnd) msUntil(started int64) float64 {
	return float64(started-e.group.Timestamps["created"].UnixMicro()) / 1000
}

// listenForEnds starts to read the events that are published from now on, until close is called. A
// pause after each read saves CPU; groupEnd.readAt is up to this time later.
func (r *fleetRun) listenForEnds(ctx context.Context, pause time.Duration) (*endListener, error) {
	e := &endListener{run: r, pause: pause, last: "0", done: make(chan struct{}), ends: map[string]groupEnd{}}
	var err error
	if e.offset, err = r.clockOffset(ctx); err != nil {
		return nil, err
	}
	newest, err := r.fleet.Conn.Cmd.XRevRangeN(ctx, r.space.Events(), "+", "-", 1).Result()
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
		read, err := e.run.fleet.Conn.Block.XRead(ctx, args).Result()
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

// record keeps the groups whose end is among the events; of a group that ends twice, the first end.
// It moves e.last on. The caller holds mu.
func (e *endListener) record(messages []redis.XMessage, readAt int64) error {
	for _, m := range messages {
		e.last = m.ID
		switch m.Values["type"] {
		case "group.completed", "group.failed", "group.cancelled":
		default:
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

// awaitCompleted waits until all these groups are COMPLETED, and returns their ends in the order of
// ids. It is an error if a group fails or is cancelled, a process or the listener has ended, or the
// groups do not end within stallTimeout.
func (e *endListener) awaitCompleted(ctx context.Context, ids []string) ([]groupEnd, error) {
	for began, n := time.Now(), 1; ; n++ {
		out, err := e.completed(ids)
		if err != nil || len(out) == len(ids) {
			return out, err
		}
		if time.Since(began) > stallTimeout {
			return nil, fmt.Errorf("await events: %d of %d groups have ended after %s",
				len(out), len(ids), stallTimeout)
		}
		if n%50 == 0 {
			if err := e.run.fleet.Check(); err != nil {
				return nil, err
			}
		}
		if err := redisx.Sleep(ctx, pollInterval); err != nil {
			return nil, err
		}
	}
}

// completed returns the ends of the groups, in the order of ids, up to the first group that has not
// ended. It is an error if one of these groups is not COMPLETED, or if the listener has failed.
func (e *endListener) completed(ids []string) ([]groupEnd, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return nil, fmt.Errorf("read events: %w", e.err)
	}
	out := make([]groupEnd, 0, len(ids))
	for _, id := range ids {
		end, ok := e.ends[id]
		if !ok {
			break
		}
		if g := end.group; g.Status != api.StatusCompleted {
			return nil, fmt.Errorf("await group %s: it is %s with %d failed jobs", id, g.Status, g.Counts.Failed)
		}
		out = append(out, end)
	}
	return out, nil
}
