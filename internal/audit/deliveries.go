package audit

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// checkDeliveries reports the unowned entries of the ready streams, of the results stream and, in
// partition 0, of the ingest stream. It also reports each of these streams whose last id is in the
// future.
func (s *scope) checkDeliveries(ctx context.Context) error {
	groups := map[string]string{s.p.ResultStream(): keyspace.GroupAggregator}
	for typ := range s.types {
		groups[s.p.Ready(typ)] = keyspace.GroupWorkers
	}
	if s.p.Index() == 0 {
		groups[s.space.Ingest()] = keyspace.GroupIngest
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		ids, err := stream.Unowned(ctx, s.Cmd, key, groups[key])
		if err != nil && !read.IsWrongType(err) { // a key of the wrong type breaks another law
			return err
		}
		for _, id := range ids {
			s.found.add(newFinding(LawDelivery, "", "", "unowned "+key+" "+id,
				"entry %s of %s was delivered, but no consumer owns it", id, key))
		}
		var refused redis.Error // there is no such stream
		about, err := s.Cmd.XInfoStream(ctx, key).Result()
		if err != nil && !errors.As(err, &refused) {
			return err
		}
		if err == nil && stream.InFuture(about.LastGeneratedID) {
			s.found.add(newFinding(LawDelivery, "", "", "future "+key,
				"the last id of %s is %s, in the future: behind the largest id it takes no entries", key,
				about.LastGeneratedID))
		}
	}
	return nil
}
