package ledger

import (
	"context"
	"fmt"
	"math"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// CreatedGroup is a group in the order of creation. Groups of the same time are ordered by id.
type CreatedGroup struct {
	Created float64 // ms
	ID      string
}

// Newest is a place before all groups.
func Newest() CreatedGroup { return CreatedGroup{Created: math.Inf(1)} }

// OlderThan reports whether a comes after b in a list that begins with the newest group.
func (a CreatedGroup) OlderThan(b CreatedGroup) bool {
	return a.Created < b.Created || (a.Created == b.Created && a.ID < b.ID)
}

// ListGroups returns a partition's groups that are older than before, the newest first: limit of
// them, or fewer if there are no more. tenant "" means all tenants.
func ListGroups(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, before CreatedGroup, limit int,
) ([]CreatedGroup, error) {
	key := p.Groups()
	if tenant != "" {
		key = p.GroupsOf(tenant)
	}
	var groups []CreatedGroup
	// The groups that were created in the same ms as before, and that are not older, may fill whole
	// pages.
	for offset := int64(0); ; offset += int64(limit) {
		page, err := c.ZRevRangeByScoreWithScores(ctx, key, &redis.ZRangeBy{
			Min: "-inf", Max: strconv.FormatFloat(before.Created, 'f', 0, 64), Offset: offset, Count: int64(limit),
		}).Result()
		if err != nil {
			return nil, fmt.Errorf("list groups of partition %d: %w", p.Index(), err)
		}
		for _, z := range page {
			id, _ := z.Member.(string)
			if g := (CreatedGroup{z.Score, id}); g.OlderThan(before) {
				groups = append(groups, g)
			}
		}
		if len(groups) >= limit || len(page) < limit {
			return groups[:min(len(groups), limit)], nil
		}
	}
}
