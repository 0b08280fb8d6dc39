package redisx

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

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
