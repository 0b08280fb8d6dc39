package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var retire = script("processes/retire")

// Retire deletes a type that has no jobs and was not served after latest. It reports whether it
// has. A new job of the type creates it again. Twice: the second call reports false.
func Retire(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string, latest time.Time) (bool, error) {
	r, err := run(ctx, c, retire, p, typ, latest.UnixMilli())
	if err != nil {
		return false, err
	}
	return r.num(0) == 1, nil
}

// HaveJobs returns for each type of a partition whether it has waiting, non-ready or ready jobs, or
// jobs in flight. It costs one round trip.
func HaveJobs(ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []string) ([]bool, error) {
	if len(types) == 0 {
		return nil, nil
	}
	loads, ready := make([]*redis.SliceCmd, len(types)), make([]*redis.IntCmd, len(types))
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, typ := range types {
			loads[i] = pipe.HMGet(ctx, p.Load(typ), layout.LoadWaiting, layout.LoadNonReady)
			ready[i] = pipe.XLen(ctx, p.Ready(typ))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the jobs of types: %w", err)
	}
	have := make([]bool, len(types))
	for i := range types {
		load := reply(loads[i].Val())
		have[i] = load.num(0) != 0 || load.num(1) != 0 || ready[i].Val() != 0
	}
	return have, nil
}
