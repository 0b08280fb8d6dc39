package redisx

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// follow has the clients of a cluster ask anew who has which slots whenever a node does not serve.
// By itself go-redis does so only where a node sends it on; a master that is gone sends nobody on,
// and would be asked for another minute.
func (c *Conn) follow() {
	for _, client := range []redis.UniversalClient{c.Cmd, c.Block} {
		if cluster, ok := client.(*redis.ClusterClient); ok {
			cluster.AddHook(follower{cluster.ReloadState})
		}
	}
}

// follower calls reload, which is cheap and never waits, after a command that found nobody
// who serves it.
type follower struct{ reload func(context.Context) }

func (f follower) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f follower) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if call.IsUnavailable(err) {
			f.reload(ctx)
		}
		return err
	}
}

func (f follower) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if err == nil {
			return nil
		}
		for _, cmd := range cmds {
			if call.IsUnavailable(cmd.Err()) {
				f.reload(ctx)
				break
			}
		}
		return err
	}
}
