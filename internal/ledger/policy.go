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

// rankGroups is the number of groups that one script ranks. It also ranks all groups that were
// created in the same ms as the last of them.
const rankGroups = 200

// SetPolicy makes a partition choose the next jobs by the priority formula over all groups, with
// this ALPHA; nil is by the fair queue. If that is a change, it ranks all open groups, in several
// calls. Twice: the second call begins again if the first one was interrupted; otherwise it does
// nothing.
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
