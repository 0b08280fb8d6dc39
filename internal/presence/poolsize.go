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

// poolSizeTTL is how long a worker process that can't reach Redis may take to learn its new number
// of slots.
const poolSizeTTL = time.Hour

// SetPoolSize asks a live worker process to have n slots. The process takes the number with its
// next heartbeat. The error wraps api.ErrNotFound if there is no such process.
func SetPoolSize(ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string, n int) error {
	workers, err := Workers(ctx, conn, space)
	if err != nil {
		return err
	}
	for _, w := range workers {
		if w.ID != id || w.ShuttingDown {
			continue
		}
		// The time makes each request a new one, also if it names the same number again.
		value := fmt.Sprintf("%d %d", n, time.Now().UnixNano())
		if err := conn.Cmd.Set(ctx, space.PoolSize(id), value, poolSizeTTL).Err(); err != nil {
			return fmt.Errorf("resize worker %s: %w", id, err)
		}
		return nil
	}
	return fmt.Errorf("worker %s: no live process has this id: %w", id, api.ErrNotFound)
}

// PoolSizes follows the number of slots that SetPoolSize sets for one worker process. Only one
// goroutine may use it.
type PoolSizes struct{ last string }

// Next calls resize with the latest number, once for each call of SetPoolSize.
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
