package ledger

import (
	"context"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// QueueRequests adds to a pipeline the question whether a partition remembers all these request ids
// of appends. After the pipeline has run, the returned function gives the answer: false also after
// an error.
func QueueRequests(
	ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, requests ...string,
) (stored func() bool) {
	scores := make([]*redis.FloatCmd, len(requests))
	for i, request := range requests {
		scores[i] = pipe.ZScore(ctx, requestsKey(p, request), request)
	}
	return func() bool {
		return !slices.ContainsFunc(scores, func(score *redis.FloatCmd) bool { return score.Err() != nil })
	}
}

// requestsKey returns the key of the sorted set that remembers a request id: append.lua keeps those
// of stream entries apart, because their ids contain a time.
func requestsKey(p keyspace.Partition, request string) string {
	if entry, ok := strings.CutPrefix(request, EntryRequest("")); ok {
		if ms, _, ok := strings.Cut(entry, "-"); ok {
			if _, isNumber := number(ms); isNumber {
				return p.Entries()
			}
		}
	}
	return p.Messages()
}
