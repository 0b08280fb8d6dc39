package ledger

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var policy = script("tenants/policy", "priority")

// rankGroups is how many groups one script ranks, and those of the same ms.
const rankGroups = 200

// SetPolicy lets a partition choose the next jobs by the user's formula over all groups,
// with its ALPHA; nil is by fair turns. What waits is put in order when that is a change.
// Harmless when repeated.
func SetPolicy(ctx context.Context, c redis.Cmdable, p keyspace.Partition, alpha *float64) error {
	want := ""
	if alpha != nil {
		want = strconv.FormatFloat(*alpha, 'f', -1, 64)
	}
	have, err := c.HGet(ctx, p.Rate(), "ranked").Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return fmt.Errorf("read policy of partition %d: %w", p.Index(), err)
	}
	if have == want {
		return nil
	}
	for from := int64(0); ; {
		r, err := run(ctx, c, policy, p, want, from, rankGroups)
		if err != nil || r.num(0) == 0 {
			return err
		}
		from = r.num(1)
	}
}
