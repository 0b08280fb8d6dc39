package presence

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// poolSizeTTL is the lifetime of a requested number of slots in Redis. A worker process that can't
// reach Redis for longer never learns it.
const poolSizeTTL = time.Hour

// SetPoolSize asks a live worker process to have n slots. The process reads the number with its
// next heartbeat. The error wraps api.ErrNotFound if there is no such process, or it is stopping.
func SetPoolSize(ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string, n int) error {
	workers, err := Workers(ctx, conn, space)
	if err != nil {
		return err
	}
	for _, w := range workers {
		if w.ID != id || w.ShuttingDown {
			continue
		}
		// The time makes each request differ from the last one, also if it names the same number
		// again.
		value := fmt.Sprintf("%d %d", n, time.Now().UnixNano())
		if err := conn.Cmd.Set(ctx, space.PoolSize(id), value, poolSizeTTL).Err(); err != nil {
			return fmt.Errorf("resize worker %s: %w", id, err)
		}
		return nil
	}
	return &api.NotFoundError{Text: "worker " + id + ": no live process has this id"}
}

// PoolSizes reads the numbers of slots that SetPoolSize sets for one worker process. Only one
// goroutine may use it.
type PoolSizes struct{ last string }

// Next reads the latest number from Redis and calls resize with it, unless it has done so for this
// call of SetPoolSize. It calls resize once for each number that it reads, even if resize fails.
func (p *PoolSizes) Next(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string, resize func(int) error,
) error {
	value, err := conn.Cmd.Get(ctx, space.PoolSize(id)).Result()
	if errors.Is(err, redis.Nil) || err == nil && value == p.last {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read pool size: %w", err)
	}
	p.last = value
	var n int
	if _, err := fmt.Sscan(value, &n); err != nil {
		return fmt.Errorf("read pool size %q: %w", value, err)
	}
	return resize(n)
}
