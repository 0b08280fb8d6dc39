package groups

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
)

// pressureAge is how old the view of the backlog may be.
const pressureAge = 200 * time.Millisecond

// pressure refuses work when the backlog or Redis's memory is full.
type pressure struct {
	cfg   Config
	conn  *redisx.Conn
	space keyspace.Space

	mu      sync.Mutex
	at      time.Time
	err     error // of the latest look
	backlog int64
	drain   float64 // jobs a second
	memory  float64 // of maxmemory
}

func newPressure(cfg Config, conn *redisx.Conn, space keyspace.Space) *pressure {
	return &pressure{cfg: cfg, conn: conn, space: space}
}

// check answers an *api.BackpressureError when n more jobs find no room.
func (p *pressure) check(ctx context.Context, n int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	// One request looks for all. So it must not end with that request, and what it could not see is an answer too:
	// otherwise all would wait in turn while Redis does not answer.
	if time.Since(p.at) > pressureAge {
		p.err = p.look(context.WithoutCancel(ctx))
		p.at = time.Now()
	}
	if p.err != nil {
		return outward(p.err)
	}
	if limit := p.cfg.MaxBacklog; limit > 0 && int64(n) > limit {
		return fmt.Errorf("%d jobs at once: the backlog holds at most %d in all: send them in smaller pieces: %w", n, limit, api.ErrInvalid)
	}
	if limit := p.cfg.MaxBacklog; limit > 0 && p.backlog+int64(n) > limit {
		return &api.BackpressureError{RetryAfter: p.wait(p.backlog + int64(n) - limit), Reason: fmt.Sprintf("the backlog holds %d of at most %d jobs", p.backlog, limit)}
	}
	if limit := p.cfg.MaxMemoryRatio; limit > 0 && p.memory > limit {
		return &api.BackpressureError{RetryAfter: p.wait(int64(p.drain) * 5), Reason: fmt.Sprintf("Redis uses %.0f%% of its memory, at most %.0f%% are filled", p.memory*100, limit*100)}
	}
	p.backlog += int64(n) // until the next look
	return nil
}

// wait is how long the workers need for so many jobs at their present speed.
func (p *pressure) wait(jobs int64) time.Duration {
	if p.drain < 1 {
		return 10 * time.Second
	}
	seconds := float64(jobs) / p.drain
	return time.Duration(min(max(seconds, 1), 60) * float64(time.Second))
}

func (p *pressure) look(ctx context.Context) error {
	p.backlog = 0
	for _, part := range p.space.All() {
		types, err := stage.Types(ctx, p.conn, part)
		if err != nil {
			return err
		}
		loads, err := loads(ctx, p.conn, part, types)
		if err != nil {
			return err
		}
		for _, l := range loads {
			p.backlog += l.Backlog
		}
	}
	workers, err := stage.Workers(ctx, p.conn, p.space)
	if err != nil {
		return err
	}
	p.drain = 0
	for _, w := range workers {
		for _, r := range w.StartedPerSecond {
			p.drain += r
		}
	}
	return p.lookAtMemory(ctx)
}

func (p *pressure) lookAtMemory(ctx context.Context) error {
	if p.cfg.MaxMemoryRatio <= 0 {
		return nil
	}
	p.memory = 0
	var mu sync.Mutex // of the shards' answers
	return p.conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		info, err := shard.Info(ctx, "memory").Result()
		if redisx.IsUnavailable(err) {
			return err
		}
		// The embedded server has no such section.
		if limit := infoNumber(info, "maxmemory"); limit > 0 {
			mu.Lock()
			defer mu.Unlock()
			p.memory = max(p.memory, float64(infoNumber(info, "used_memory"))/float64(limit))
		}
		return nil
	})
}

func infoNumber(info, name string) int64 {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			return n
		}
	}
	return 0
}

// loads reads what waits and runs of types in one partition.
func loads(ctx context.Context, conn *redisx.Conn, p keyspace.Partition, types []string) ([]api.TypeStats, error) {
	out := make([]api.TypeStats, len(types))
	if len(types) == 0 {
		return out, nil
	}
	type replies struct {
		load    *redis.SliceCmd
		length  *redis.IntCmd
		pending *redis.XPendingCmd
	}
	cmds := make([]replies, len(types))
	_, _ = conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, typ := range types {
			cmds[i] = replies{
				load: pipe.HMGet(ctx, p.Load(typ), "waiting", "non_ready"), length: pipe.XLen(ctx, p.Ready(typ)),
				pending: pipe.XPending(ctx, p.Ready(typ), keyspace.GroupWorkers),
			}
		}
		return nil
	})
	for i, typ := range types {
		load, err := cmds[i].load.Result()
		if err != nil {
			return nil, fmt.Errorf("read load of type %s: %w", typ, err)
		}
		var inFlight int64
		pending, err := cmds[i].pending.Result()
		switch {
		case err == nil:
			inFlight = pending.Count
		case redisx.IsUnavailable(err):
			return nil, fmt.Errorf("read load of type %s: %w", typ, err)
		}
		ready := max(0, cmds[i].length.Val()-inFlight)
		s := api.TypeStats{Type: typ, Waiting: number(load[0]), NonReady: number(load[1]), Ready: ready, InFlight: inFlight}
		s.Backlog = s.Waiting + s.NonReady + s.Ready
		out[i] = s
	}
	return out, nil
}

// number reads a hash field's value; one that is not there is 0.
func number(v any) int64 {
	s, _ := v.(string)
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}
