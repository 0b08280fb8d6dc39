package groups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// A write is answered for when as many replicas have it as were asked for (REDIS_WAIT_REPLICAS).
// One that is not is no loss: the caller is told to repeat, which is harmless.

// proof asks a master for what shows that a write is there, and tells afterwards whether it is.
type proof func(redis.Pipeliner) (there func() bool)

// errLost says that what was written is there no more.
var errLost = errors.New("a failover has lost what was written")

func lost(p keyspace.Partition) error {
	return fmt.Errorf("%w: %w to partition %d: repeat it", api.ErrUnavailable, errLost, p.Index())
}

// applied shows that requests are remembered in a sorted set.
func applied(key string, requests ...string) proof {
	return func(pipe redis.Pipeliner) func() bool {
		scores := make([]*redis.FloatCmd, len(requests))
		for i, request := range requests {
			scores[i] = pipe.ZScore(context.Background(), key, request) // queued, not sent: Exec has the context
		}
		return func() bool {
			return !slices.ContainsFunc(scores, func(score *redis.FloatCmd) bool { return score.Err() != nil })
		}
	}
}

// owned shows that a group is known to be a tenant's.
func owned(registry keyspace.Partition, group, tenant string) proof {
	return func(pipe redis.Pipeliner) func() bool {
		owner := pipe.Get(context.Background(), registry.Owner(group))
		return func() bool { return owner.Val() == tenant }
	}
}

// both shows two things that one master has.
func both(a, b proof) proof {
	return func(pipe redis.Pipeliner) func() bool {
		a, b := a(pipe), b(pipe)
		return func() bool { return a() && b() }
	}
}

// groupNow is what commands change of a group.
type groupNow struct {
	status                               string
	round                                int
	sealed, announced, paused, submitted bool
}

// groupIs shows that a group is as it should be.
func groupIs(p keyspace.Partition, group string, holds func(groupNow) bool) proof {
	return func(pipe redis.Pipeliner) func() bool {
		fields := pipe.HMGet(context.Background(), p.Group(group), "status", "round", "sealed",
			"total", "paused", "submitted")
		return func() bool {
			v := fields.Val()
			if fields.Err() != nil || v[0] == nil {
				return false
			}
			g := groupNow{sealed: v[2] != nil, announced: v[3] != nil, paused: v[4] != nil, submitted: v[5] != nil}
			g.status, _ = v[0].(string)
			round, _ := v[1].(string)
			g.round, _ = strconv.Atoi(round)
			return holds(g)
		}
	}
}

// durableSubmission waits for a submitted group and for what says whose it is, which may lie at
// another master.
func (s *Store) durableSubmission(ctx context.Context, p keyspace.Partition, g *messages.SubmitGroup) error {
	registry := s.space.OfGroup(g.ID)
	owner := owned(registry, g.ID, g.Tenant)
	stored := groupIs(p, g.ID, func(now groupNow) bool {
		return now.submitted || len(g.Jobs) == 0 && (now.sealed || !endsEmpty(g))
	})
	if registry.Index() == p.Index() {
		return s.durable(ctx, p, both(owner, stored))
	}
	if err := s.durable(ctx, registry, owner); err != nil {
		return err
	}
	return s.durable(ctx, p, stored)
}

// durable waits until the replicas of a partition have what was written to it, as far as
// shown is there.
func (s *Store) durable(ctx context.Context, p keyspace.Partition, shown proof) error {
	if s.cfg.WaitReplicas == 0 {
		return nil
	}
	c := s.commits[p.Index()]
	mine := &commit{shown: shown}
	if err := c.waits.join(ctx, mine, func(ctx context.Context, all []*commit) { c.wait(ctx, s, p, all) }); err != nil {
		return err
	}
	if mine.err == nil && !mine.there() {
		return lost(p)
	}
	return mine.err
}

// committer lets those who come while one wait is going on share the next.
type committer struct {
	waits *convoy[*commit]

	mu      sync.Mutex
	warning bool // that there are too few replicas was said
}

// commit is one of those who share a wait.
type commit struct {
	shown proof
	there func() bool
	err   error
}

func newCommitters(space keyspace.Space) []*committer {
	all := make([]*committer, space.Partitions())
	for i, waits := range newConvoys[*commit](space) {
		all[i] = &committer{waits: waits}
	}
	return all
}

func (c *committer) wait(ctx context.Context, s *Store, p keyspace.Partition, all []*commit) {
	var replicas int
	err := insist(ctx, func(ctx context.Context) (err error) {
		replicas, err = s.conn.AwaitReplicas(ctx, p.Waited(), s.cfg.WaitReplicas, s.cfg.WaitTimeout,
			func(pipe redis.Pipeliner) {
				for _, one := range all {
					one.there = one.shown(pipe)
				}
			})
		return err
	})
	if err == nil && replicas < s.cfg.WaitReplicas {
		err = fmt.Errorf("%w: %d replicas have what was written to partition %d, %d must have it",
			api.ErrReplicas, replicas, p.Index(), s.cfg.WaitReplicas)
	}
	c.tell(s, err)
	for _, one := range all {
		one.err = err
	}
}

// tell logs once that replicas lag, and that they do no more: nothing is accepted meanwhile.
func (c *committer) tell(s *Store, err error) {
	lag := errors.Is(err, api.ErrUnavailable)
	c.mu.Lock()
	changed := lag != c.warning && (lag || err == nil)
	if changed {
		c.warning = lag
	}
	c.mu.Unlock()
	switch {
	case changed && lag:
		s.tel.Log.Warn("replicas lag: nothing is accepted until they have what was written", "error", err)
	case changed:
		s.tel.Log.Info("replicas have what was written again")
	}
}
