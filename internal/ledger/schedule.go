package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var schedule = script("groups/schedule", "signals", "tenants", "priority", "fair_queue")

// Schedule takes groups whose run_at has come from the schedule, at most `most` of them, and puts
// them into the fair queue; a paused group enters it when it is resumed. It returns how many it has
// taken, and the time until the next one (negative: there is none). Twice: the second call takes
// the next groups.
func Schedule(ctx context.Context, c redis.Cmdable, p keyspace.Partition, most int) (int, time.Duration, error) {
	r, err := run(ctx, c, schedule, p, most)
	if err != nil {
		return 0, 0, err
	}
	return int(r.num(0)), time.Duration(r.num(1)) * time.Millisecond, nil
}
