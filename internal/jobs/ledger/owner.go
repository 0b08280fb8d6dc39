package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// GroupOwner returns the tenant of a group. p is the partition of the group's id, which need not
// be the tenant's. Errors: api.ErrNotFound.
func GroupOwner(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (string, error) {
	tenant, err := c.Get(ctx, p.Owner(group)).Result()
	if errors.Is(err, redis.Nil) {
		return "", UnknownGroup(group)
	}
	if err != nil {
		return "", fmt.Errorf("find group %s: %w", group, err)
	}
	return tenant, nil
}

// UnknownGroup returns the error for a group that does not exist.
func UnknownGroup(group string) error { return fmt.Errorf("group %s: %w", group, api.ErrNotFound) }

// RegisterOwner makes tenant the owner of a group that has no owner, and returns the group's owner.
// p is the partition of the group's id. Two tenants can't own the same group. Twice: the second
// call returns the owner.
func RegisterOwner(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, tenant string,
) (owner string, err error) {
	key := p.Owner(group)
	for {
		ok, err := c.SetNX(ctx, key, tenant, 0).Result()
		if err != nil || ok {
			return tenant, err
		}
		owner, err = c.Get(ctx, key).Result()
		if !errors.Is(err, redis.Nil) { // Nil: the key was deleted between the two commands
			return owner, err
		}
	}
}

// QueueOwner adds the read of a group's owner to a pipeline. After the pipeline has run, the
// returned function gives the tenant; "" if there is none, and also after an error.
func QueueOwner(ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, group string) func() string {
	return pipe.Get(ctx, p.Owner(group)).Val
}

// QueueRequests adds reads to a pipeline that find out whether a partition remembers all these
// request ids of appends. After the pipeline has run, the returned function gives the answer; false
// also after an error.
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

// requestsKey returns the key of the sorted set that remembers a request id. append.lua stores the
// ids that begin with an entry's id (EntryRequest) in a set of their own, ordered by the time in
// that id: they are needed only as long as the entry can be delivered again.
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
