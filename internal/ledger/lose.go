package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var lose = script("jobs/lose", "signals", "states", "blob", "tenants", "priority", "fair_queue", "endings")

// MaxLose is the most jobs of one Lose.
const MaxLose = 200

// Missed is a job that was at none of its possible locations, and the state that it had then.
type Missed struct {
	Ordinal int64
	State   State
}

// Lose fails jobs of a group that vanished from Redis, with code LOST. typ is their type, "" if
// they may be of several types. It returns the ordinals of the jobs that have failed: not those of
// jobs that have moved since they were missed. Twice: the second call finds that they have failed.
func Lose(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, typ string, jobs []Missed,
) ([]int64, error) {
	if len(jobs) > MaxLose {
		return nil, fmt.Errorf("lose jobs of group %s: %d are more than %d", group, len(jobs), MaxLose)
	}
	args := make([]any, 0, 2+2*len(jobs))
	args = append(args, group, typ)
	for _, j := range jobs {
		args = append(args, j.Ordinal, string(j.State))
	}
	r, err := run(ctx, c, lose, p, args...)
	if err != nil {
		return nil, err
	}
	return r.nums(), nil
}
