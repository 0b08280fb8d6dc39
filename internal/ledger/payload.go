package ledger

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// JobRef names a job.
type JobRef struct {
	Group   string
	Ordinal int64
}

// Payloads reads the payloads of jobs whose blobs do not contain them because they are large, in
// one round trip. A payload that is lost is "".
func Payloads(ctx context.Context, c redis.Cmdable, p keyspace.Partition, jobs []JobRef) ([]string, error) {
	keys := make([]string, len(jobs))
	for i, j := range jobs {
		keys[i] = p.Payloads(j.Group)
	}
	payloads, err := readField(ctx, c, keys, func(i int) string { return strconv.FormatInt(jobs[i].Ordinal, 10) })
	if err != nil {
		return nil, fmt.Errorf("read payloads: %w", err)
	}
	return payloads, nil
}
