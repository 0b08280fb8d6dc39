package redisx

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// mark writes its key whether memory is full or not: a first write of nothing lets the
// second through.
const mark = `redis.call('DEL', KEYS[1]) return redis.call('SET', KEYS[1], 1)`

// AwaitReplicas writes key at its master and waits until so many replicas have that, and with it
// all that the master wrote before; it returns how many do, after timeout at the latest. What reads
// queues is asked of the same master before that: a write that is not there, a failover has lost.
// All goes over one connection, since WAIT is about its own.
func (c *Conn) AwaitReplicas(
	ctx context.Context, key string, replicas int, timeout time.Duration, reads func(redis.Pipeliner),
) (int, error) {
	master, err := c.master(ctx, key)
	if err != nil {
		return 0, fmt.Errorf("find the master of %s: %w", key, err)
	}
	pipe := master.Pipeline()
	reads(pipe)
	// 0 would wait for ever
	written, have := pipe.Eval(ctx, mark, []string{key}),
		redis.NewIntCmd(ctx, "wait", replicas, max(timeout.Milliseconds(), 1))
	_ = pipe.Process(ctx, have)
	_, _ = pipe.Exec(ctx) // each command has its own error
	for _, err := range []error{written.Err(), have.Err()} {
		if err != nil {
			if cluster, ok := c.Cmd.(*redis.ClusterClient); ok {
				cluster.ReloadState(ctx) // it may have another master now
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

// CheckReplicas returns an error when a server can't have replicas, such as an embedded one.
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
