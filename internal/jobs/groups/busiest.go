package groups

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// MaxBusiest is the largest number of tenants that MeasureBusiest stores for a partition, and that
// an answer has.
const MaxBusiest = 100

// busiestPage is about how many active tenants MeasureBusiest reads at once.
const busiestPage = 500

// busiest is the document with the busiest tenants of a partition, as it is stored in Redis.
type busiest struct {
	AsOf    time.Time    `json:"as_of"` // when the first of the partition's tenants was read
	Tenants []api.Tenant `json:"tenants"`
}

// MeasureBusiest finds the tenants of a partition with the most unfinished jobs among the active
// ones, and stores them for BusiestTenants. After each page of n tenants it calls pause, which may
// wait to spread the load; after an error of pause it stores nothing.
func (s *tenants) MeasureBusiest(
	ctx context.Context, p keyspace.Partition, pause func(ctx context.Context, n int) error,
) error {
	found := busiest{AsOf: time.Now().UTC(), Tenants: []api.Tenant{}}
	most := map[string]int64{} // the tenants with the most unfinished jobs so far
	for cursor := uint64(0); ; {
		ids, unfinished, next, err := ledger.ActiveTenants(ctx, s.conn.Cmd, p, cursor, busiestPage)
		if err != nil {
			return err
		}
		for i, id := range ids {
			most[id] = unfinished[i]
		}
		keepBusiest(most)
		if err := pause(ctx, len(ids)); err != nil {
			return err
		}
		if cursor = next; cursor == 0 {
			break
		}
	}
	refs := make([]ledger.TenantRef, 0, len(most))
	for id := range most {
		refs = append(refs, ledger.TenantRef{Partition: p, ID: id})
	}
	states, err := s.states(ctx, refs)
	if err != nil {
		return err
	}
	for i, st := range states {
		if st.Unfinished > 0 {
			found.Tenants = append(found.Tenants, s.view(refs[i].ID, st))
		}
	}
	slices.SortFunc(found.Tenants, byBacklog)
	document, err := json.Marshal(found)
	if err != nil {
		return fmt.Errorf("encode the busiest tenants: %w", err)
	}
	return ledger.StoreBusiest(ctx, s.conn.Cmd, p, document)
}

// keepBusiest removes all but the MaxBusiest tenants with the most unfinished jobs.
func keepBusiest(most map[string]int64) {
	if len(most) <= MaxBusiest {
		return
	}
	ids := make([]string, 0, len(most))
	for id := range most {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b string) int { return cmp.Or(cmp.Compare(most[b], most[a]), cmp.Compare(a, b)) })
	for _, id := range ids[MaxBusiest:] {
		delete(most, id)
	}
}

func byBacklog(a, b api.Tenant) int {
	return cmp.Or(cmp.Compare(b.Unfinished, a.Unfinished), cmp.Compare(a.ID, b.ID))
}

// BusiestTenants returns the active tenants with the most unfinished jobs, as the watchers stored
// them last: at most limit, and at most MaxBusiest. Partitions are measured at different times:
// AsOf is the earliest of them, nil if no watcher has stored any data. A principal of one tenant
// gets this tenant as it is now, if it exists, even if it is not active.
func (s *tenants) BusiestTenants(ctx context.Context, limit int) (api.TenantList, error) {
	list := api.TenantList{Tenants: []api.Tenant{}}
	own, err := ownTenant(ctx)
	if err != nil {
		return list, err
	}
	if own != "" {
		now := time.Now().UTC()
		list.AsOf = &now
		t, err := s.Tenant(ctx, own)
		if errors.Is(err, api.ErrNotFound) {
			return list, nil
		}
		list.Tenants = append(list.Tenants, t)
		return list, err
	}
	for _, p := range s.space.All() {
		document, err := ledger.Busiest(ctx, s.conn.Cmd, p)
		if err != nil {
			return list, apiError(err)
		}
		if document == nil {
			continue
		}
		var found busiest
		if err := json.Unmarshal(document, &found); err != nil {
			return list, fmt.Errorf("decode the busiest tenants of partition %d: %w", p.Index(), err)
		}
		list.Tenants = append(list.Tenants, found.Tenants...)
		if list.AsOf == nil || found.AsOf.Before(*list.AsOf) {
			list.AsOf = &found.AsOf
		}
	}
	slices.SortFunc(list.Tenants, byBacklog)
	list.Tenants = list.Tenants[:min(len(list.Tenants), limit, MaxBusiest)]
	return list, nil
}
