package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/lua"
)

var dropConsumer = call.NewScript("drop_consumer", lua.Source("processes/drop_consumer"))

// DropConsumer deletes a stream's consumer, if it holds no entries and was idle for at least the
// given time. It reports whether it has deleted it. Twice: the second call reports false.
func DropConsumer(
	ctx context.Context, c redis.Cmdable, stream, group, consumer string, idle time.Duration,
) (bool, error) {
	r, err := dropConsumer.Run(ctx, c, []string{stream}, []any{group, consumer, idle.Milliseconds()})
	if err != nil {
		return false, err
	}
	n, _ := r.(int64)
	return n == 1, nil
}
