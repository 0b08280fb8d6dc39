package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var retire = script("processes/retire")

// Retire forgets a type that holds nothing and was not served since latest; it
// tells whether it did.
func Retire(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string, latest time.Time) (bool, error) {
	r, err := run(ctx, c, retire, p, typ, latest.UnixMilli())
	if err != nil {
		return false, err
	}
	return r.num(0) == 1, nil
}
