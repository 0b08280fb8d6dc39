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

// endings collects the ends of groups from the events stream, as any producer can.
type endings struct {
	b      *run
	offset time.Duration // Redis's clock minus this process's
	pause  time.Duration // after each read
	last   string        // id of the last event that was read
	stop   context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex
	of   map[string]ending // by group
	fail error
}

// ending is a group that has ended.
type ending struct {
	heard int64 // µs of Redis, when the event was read
	group *api.Group
}

// waited returns the ms from accepted to started, where started is µs of Redis.
func (e ending) waited(started int64) float64 {
	return float64(started-e.group.Timestamps["created"].UnixMicro()) / 1000
}

// listen reads the events from now on. A pause between reads saves CPU where the time of reading
// does not matter.
func (b *run) listen(ctx context.Context, pause time.Duration) (*endings, error) {
	e := &endings{b: b, pause: pause, last: "0", done: make(chan struct{}), of: map[string]ending{}}
	var err error
	if e.offset, err = b.offset(ctx); err != nil {
		return nil, err
	}
	newest, err := b.f.Conn.Cmd.XRevRangeN(ctx, b.space.Events(), "+", "-", 1).Result()
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	if len(newest) > 0 {
		e.last = newest[0].ID
	}
	ctx, e.stop = context.WithCancel(ctx)
	go e.read(ctx)
	return e, nil
}

func (e *endings) close() {
	e.stop()
	<-e.done
}

func (e *endings) read(ctx context.Context) {
	defer close(e.done)
	for ctx.Err() == nil {
		args := &redis.XReadArgs{Streams: []string{e.b.space.Events(), e.last}, Block: redisx.MaxBlock, Count: 1000}
		read, err := e.b.f.Conn.Block.XRead(ctx, args).Result()
		heard := time.Now().Add(e.offset).UnixMicro()
		if errors.Is(err, redis.Nil) {
			continue
		}
		e.mu.Lock()
		if err == nil {
			err = e.note(read[0].Messages, heard)
		}
		e.fail = err
		e.mu.Unlock()
		if err != nil || redisx.Sleep(ctx, e.pause) != nil {
			return
		}
	}
}

// note keeps the groups that have ended; mu is held.
func (e *endings) note(messages []redis.XMessage, heard int64) error {
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
		if _, again := e.of[event.Group.ID]; !again {
			e.of[event.Group.ID] = ending{heard, event.Group}
		}
	}
	return nil
}

// await waits until all these groups are COMPLETED, and returns their ends in the order of ids.
func (e *endings) await(ctx context.Context, ids []string) ([]ending, error) {
	for began, n := time.Now(), 1; ; n++ {
		out, err := e.completed(ids)
		if err != nil || len(out) == len(ids) {
			return out, err
		}
		if time.Since(began) > stalled {
			return nil, fmt.Errorf("await events: %d of %d groups have ended after %s", len(out), len(ids), stalled)
		}
		if n%50 == 0 {
			if err := e.b.f.Check(); err != nil {
				return nil, err
			}
		}
		if err := redisx.Sleep(ctx, pollInterval); err != nil {
			return nil, err
		}
	}
}

// completed returns the ends of the groups up to the first that has none yet.
func (e *endings) completed(ids []string) ([]ending, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.fail != nil {
		return nil, fmt.Errorf("read events: %w", e.fail)
	}
	out := make([]ending, 0, len(ids))
	for _, id := range ids {
		end, ok := e.of[id]
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
