// Package backpressure decides whether ingest accepts more jobs now. It refuses them when the
// backlog or Redis's memory is full, and tells the client when to try again.
package backpressure

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// pressureAge is how old the view of the backlog may be; freshAge, for one who wants more than a
// process's share.
const (
	pressureAge = 200 * time.Millisecond
	freshAge    = 20 * time.Millisecond
)

// memoryWait is said while memory is full and does not fall.
const memoryWait = 5 * time.Second

// stageRole is what an ingest process calls itself in its status.
const stageRole = "ingest"

// Config holds the limits. 0 is no limit.
type Config struct {
	MaxBacklog     int64   // jobs that have not ended, of all groups
	MaxMemoryRatio float64 // part of Redis's maxmemory that may be used
}

// Controller refuses work when the backlog or Redis's memory is full.
type Controller struct {
	cfg   Config
	conn  *redisx.Conn
	space keyspace.Space

	mu     sync.Mutex
	gate   gate
	at     time.Time
	err    error // of the latest look
	memory memory

	flying atomic.Int64 // jobs let in whose requests have not ended: a look may miss them
}

// memory is how full Redis is.
type memory struct {
	ratio float64 // of maxmemory
	at    time.Time
	falls float64 // a second
}

// New returns the admission controller of one process.
func New(cfg Config, conn *redisx.Conn, space keyspace.Space) *Controller {
	return &Controller{cfg: cfg, conn: conn, space: space, gate: newGate(cfg.MaxBacklog)}
}

// Check returns an *api.BackpressureError when n more jobs find no room. Without an error they
// count as accepted until the context's Request ends.
func (p *Controller) Check(ctx context.Context, n int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	limit, jobs := p.cfg.MaxBacklog, int64(n)
	if limit > 0 && jobs > limit {
		return fmt.Errorf("%d jobs at once: the backlog holds at most %d in all: send them in smaller pieces: %w",
			n, limit, api.ErrInvalid)
	}
	age := pressureAge
	if p.gate.large(jobs) {
		age = freshAge
	}
	// One request looks for all. So it must not end with that request, and what it could not see is
	// an answer too: otherwise all would wait in turn while Redis does not answer.
	if time.Since(p.at) > age {
		p.err = p.look(context.WithoutCancel(ctx))
		p.at = time.Now()
	}
	if p.err != nil {
		return p.err
	}
	r, shut := requestOf(ctx), p.shut()
	if shut == 0 && (limit <= 0 || n == 0) {
		return nil
	}
	var c claim
	if r != nil {
		c = r.claim
	}
	wait, ok := p.gate.admit(time.Now(), c, jobs, shut)
	if ok {
		r.letIn(p, jobs)
		return nil
	}
	full := &api.BackpressureError{
		RetryAfter: wait,
		Reason:     fmt.Sprintf("the backlog holds %d of at most %d jobs", limit-p.gate.room, limit),
	}
	switch {
	case shut > 0:
		full.Reason = fmt.Sprintf("Redis uses %.0f%% of its memory, at most %.0f%% are filled",
			p.memory.ratio*100, p.cfg.MaxMemoryRatio*100)
	case jobs <= p.gate.room:
		full.Reason += ", and the rest is promised to those who came before"
	}
	return full
}

// shut is how long there will be no memory: as it has been falling, or a guess.
func (p *Controller) shut() time.Duration {
	over := p.memory.ratio - p.cfg.MaxMemoryRatio
	switch {
	case p.cfg.MaxMemoryRatio <= 0 || over <= 0:
		return 0
	case p.memory.falls <= 0:
		return memoryWait
	}
	return max(time.Second, time.Duration(min(over/p.memory.falls, time.Minute.Seconds())*float64(time.Second)))
}

func (p *Controller) look(ctx context.Context) error {
	since := p.at
	backlog := p.flying.Load() // before the look: it may miss them, or count them twice
	for _, part := range p.space.All() {
		types, err := ledger.Types(ctx, p.conn, part)
		if err != nil {
			return err
		}
		loads, err := ledger.Loads(ctx, p.conn, part, types)
		if err != nil {
			return err
		}
		for _, l := range loads {
			backlog += l.Backlog
		}
	}
	workers, err := presence.Workers(ctx, p.conn, p.space)
	if err != nil {
		return err
	}
	drain := 0.0
	for _, w := range workers {
		for _, r := range w.StartedPerSecond {
			drain += r
		}
	}
	stages, err := presence.Stages(ctx, p.conn, p.space)
	if err != nil {
		return err
	}
	peers := int64(0)
	for _, s := range stages {
		if s.Role == stageRole {
			peers++
		}
	}
	p.gate.see(backlog, peers, drain, time.Since(since))
	return p.lookAtMemory(ctx)
}

func (p *Controller) lookAtMemory(ctx context.Context) error {
	if p.cfg.MaxMemoryRatio <= 0 {
		return nil
	}
	var mu sync.Mutex // of the shards' answers
	ratio := 0.0
	err := p.conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		info, err := shard.Info(ctx, "memory").Result()
		if call.IsUnavailable(err) {
			return err
		}
		// The embedded server has no such section.
		if limit := infoNumber(info, "maxmemory"); limit > 0 {
			mu.Lock()
			defer mu.Unlock()
			ratio = max(ratio, float64(infoNumber(info, "used_memory"))/float64(limit))
		}
		return nil
	})
	if err != nil {
		return err
	}
	m := &p.memory
	now := time.Now()
	if elapsed := now.Sub(m.at); !m.at.IsZero() && elapsed < time.Minute {
		falls := (m.ratio - ratio) / elapsed.Seconds()
		m.falls += (falls - m.falls) * (1 - math.Exp(-elapsed.Seconds()))
	}
	m.ratio, m.at = ratio, now
	return nil
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
