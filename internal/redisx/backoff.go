package redisx

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// Backoff returns waiting times that double from Min to Max. Jitter keeps processes that failed
// together from retrying together. It is ready for use once Min and Max are set, and not safe for
// concurrent use.
type Backoff struct {
	Min, Max time.Duration
	ceiling  time.Duration
}

// Next returns how long to wait now: a random time between half the ceiling and the ceiling, but at
// least Min. The ceiling is twice Min at the first call, doubles with each further call, and is at
// most Max.
func (b *Backoff) Next() time.Duration {
	b.ceiling = min(max(2*b.ceiling, 2*b.Min), b.Max)
	return max(b.Min, Jitter(b.ceiling))
}

// Reset makes the ceiling of the next wait twice Min again; call it after a success.
func (b *Backoff) Reset() { b.ceiling = 0 }

// Jitter returns a random time between d/2 and d.
func Jitter(d time.Duration) time.Duration {
	if d < 2 {
		return d
	}
	return d/2 + rand.N(d/2+1)
}

// RetryWhile calls step until it succeeds or returns an error that retryable refuses, with waits of
// 10 ms to half a second. It makes no further try if the last one ended when patience was over, or
// if ctx has ended. It returns the error of the last try; nil if that succeeded.
func RetryWhile(
	ctx context.Context, patience time.Duration, retryable func(error) bool, step func(context.Context) error,
) error {
	deadline := time.Now().Add(patience)
	return Retry(ctx, Backoff{Min: 10 * time.Millisecond, Max: 500 * time.Millisecond}, func(err error) bool {
		return retryable(err) && !time.Now().After(deadline)
	}, step)
}

// Retry calls step until it succeeds, ctx ends, or again, which may log the error, says that it is
// not to be tried again. It returns the error of the last try; nil if that succeeded.
func Retry(
	ctx context.Context, backoff Backoff, again func(error) bool, step func(context.Context) error,
) error {
	for {
		err := step(ctx)
		if err == nil || !again(err) || ctx.Err() != nil || Sleep(ctx, backoff.Next()) != nil {
			return err
		}
	}
}

// Sleep waits for d and returns nil. If ctx ends first, Sleep returns the error of ctx at once.
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// mark is a script that sets its key even if Redis's memory is full: Redis lets a script begin with
// DEL then, and does not refuse the script's later writes.
const mark = `redis.call('DEL', KEYS[1]) return redis.call('SET', KEYS[1], 1)`

// AwaitReplicas writes key on its master and waits until at least `replicas` replicas have this
// write, and with it all earlier writes of the master. It returns the number of replicas that have
// it, after timeout at the latest; too few is no error. reads adds commands that the same master
// answers before this write: if they do not see an earlier write, a failover has lost it. Their
// errors are the caller's to check. All commands use one connection, because WAIT refers to the
// writes of its own connection.
func (c *Conn) AwaitReplicas(
	ctx context.Context, key string, replicas int, timeout time.Duration, reads func(redis.Pipeliner),
) (int, error) {
	master, err := c.master(ctx, key)
	if err != nil {
		return 0, fmt.Errorf("find the master of %s: %w", key, err)
	}
	pipe := master.Pipeline()
	reads(pipe)
	// a timeout of 0 would wait forever
	written, have := pipe.Eval(ctx, mark, []string{key}),
		redis.NewIntCmd(ctx, "wait", replicas, max(timeout.Milliseconds(), 1))
	_ = pipe.Process(ctx, have)
	_, _ = pipe.Exec(ctx) // each command is checked by itself
	for _, err := range []error{written.Err(), have.Err()} {
		if err != nil {
			if cluster, ok := c.Cmd.(*redis.ClusterClient); ok {
				cluster.ReloadState(ctx) // the slot may have a new master
			}
			return 0, fmt.Errorf("wait for replicas: %w", err)
		}
	}
	return int(have.Val()), nil
}

func (c *Conn) master(ctx context.Context, key string) (redis.UniversalClient, error) {
	if cluster, ok := c.Cmd.(*redis.ClusterClient); ok {
		return cluster.MasterForKey(ctx, key)
	}
	return c.Cmd, nil
}

// CheckReplicas returns an error if a master does not report a number of replicas, such as an
// embedded server or one that this process may not ask, or does not answer. The number may be 0.
func (c *Conn) CheckReplicas(ctx context.Context) error {
	return c.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		info, err := shard.Info(ctx, "replication").Result()
		if call.IsUnavailable(err) {
			return err
		}
		if err != nil || !strings.Contains(info, "connected_slaves:") {
			return fmt.Errorf(
				"redis says nothing of replicas: run a Redis that has some, or set BULKACTION_REDIS_WAIT_REPLICAS to 0",
			)
		}
		return nil
	})
}
