package redisx

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// follow makes the cluster clients reload the map of hash slots after a command that no node
// served. go-redis by itself reloads it only when a node redirects a command. A dead master
// redirects no command, so the client would use it for another minute.
func (c *Conn) follow() {
	for _, client := range []redis.UniversalClient{c.Cmd, c.Block} {
		if cluster, ok := client.(*redis.ClusterClient); ok {
			cluster.AddHook(follower{cluster.ReloadState})
		}
	}
}

// follower is a go-redis hook that calls reload after a command that no node served. reload is
// cheap and does not block.
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
