package audit

import (
	"context"
	"maps"
	"slices"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// checkDeliveries reports the entries that were delivered and that no consumer owns: of the ready
// streams, of the results stream and, with partition 0, of the ingest stream.
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
	}
	return nil
}
