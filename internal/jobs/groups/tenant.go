package groups

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/apivalue"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// tenants shows tenants and changes their settings.
type tenants struct{ *access }

// SetTenant replaces a tenant's settings and returns the tenant. A pause is not a setting, and
// stays. An unknown tenant becomes known, unless all fields of set are nil.
func (s *tenants) SetTenant(ctx context.Context, tenant string, set api.TenantSettings) (api.Tenant, error) {
	return s.change(ctx, tenant, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.SetTenant(ctx, s.conn.Cmd, p, tenant, ledger.TenantSettings(set))
	})
}

// PatchTenant changes some of a tenant's settings and returns the tenant. An unknown tenant is
// treated as by SetTenant.
func (s *tenants) PatchTenant(ctx context.Context, tenant string, patch api.TenantPatch) (api.Tenant, error) {
	return s.change(ctx, tenant, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.ChangeTenant(ctx, s.conn.Cmd, p, tenant, patch)
	})
}

// change calls do, which changes a tenant and may be repeated, and returns the tenant as it is
// afterwards.
func (s *tenants) change(
	ctx context.Context, tenant string, do func(context.Context, keyspace.Partition) error,
) (api.Tenant, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.Tenant{}, err
	}
	p := s.space.OfTenant(tenant)
	if err := retryUnavailable(ctx, func(ctx context.Context) error { return do(ctx, p) }); err != nil {
		return api.Tenant{}, apiError(err)
	}
	st, err := s.state(ctx, p, tenant)
	return s.view(tenant, st), apiError(err)
}

// Tenant returns a tenant that has groups or settings, or is paused. For any other id it returns
// api.ErrNotFound.
func (s *tenants) Tenant(ctx context.Context, tenant string) (api.Tenant, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.Tenant{}, err
	}
	st, err := s.state(ctx, s.space.OfTenant(tenant), tenant)
	if err != nil {
		return api.Tenant{}, apiError(err)
	}
	if !st.Known && !st.Paused {
		return api.Tenant{}, unknownTenant(tenant)
	}
	return s.view(tenant, st), nil
}

// PreviewTenant returns the tenant as it would be after PatchTenant, without storing the patch. Its
// errors are those of Tenant.
func (s *tenants) PreviewTenant(ctx context.Context, tenant string, patch api.TenantPatch) (api.Tenant, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.Tenant{}, err
	}
	p := s.space.OfTenant(tenant)
	st, err := s.state(ctx, p, tenant)
	if err != nil {
		return api.Tenant{}, apiError(err)
	}
	if !st.Known && !st.Paused {
		return api.Tenant{}, unknownTenant(tenant)
	}
	set := st.Settings
	if patch.RPS.Given {
		set.RPS = patch.RPS.Value
	}
	if patch.Weight.Given {
		set.Weight = patch.Weight.Value
	}
	if patch.BasePriority.Given {
		set.BasePriority = patch.BasePriority.Value
	}
	st, err = ledger.TenantWith(ctx, s.conn.Cmd, p, tenant, s.partitionLimit(p), set)
	if err != nil {
		return api.Tenant{}, apiError(fmt.Errorf("preview tenant %s: %w", tenant, err))
	}
	return s.view(tenant, st), nil
}

// tenantsPerCall is the most tenants that one call of Tenants looks at to find those that are not
// implicit, unless the page's limit is higher.
const tenantsPerCall = 1000

// Tenants lists tenants by id. A call reads a bounded number of tenants (tenantsOfEach), so a page
// with a cursor may be short. If all is false, it omits implicit tenants (ledger.ImplicitTenants),
// and such a page may be empty. The cursor is the id of the last tenant that the call has looked
// at. A principal of one tenant gets this tenant, if it exists.
func (s *tenants) Tenants(ctx context.Context, cursor string, limit int, all bool) (api.TenantList, error) {
	list := api.TenantList{Tenants: []api.Tenant{}}
	if cursor != "" && !api.ValidID(cursor) {
		return list, badCursor()
	}
	own, err := ownTenant(ctx)
	switch {
	case err != nil:
		return list, err
	case own != "" && own <= cursor:
		return list, nil
	case own != "":
		t, err := s.Tenant(ctx, own)
		if errors.Is(err, api.ErrNotFound) {
			return list, nil
		}
		list.Tenants = append(list.Tenants, t)
		return list, err
	}
	most := limit
	if !all {
		most = max(limit, tenantsPerCall)
	}
	parts := s.space.All()
	found, more, err := ledger.Tenants(ctx, s.conn.Cmd, parts, cursor, tenantsOfEach(most, len(parts)))
	if err != nil {
		return list, apiError(err)
	}
	looked := min(most, len(found))
	page := found[:looked]
	if !all {
		if page, looked, err = s.listed(ctx, page, limit); err != nil {
			return list, apiError(err)
		}
	}
	if more || looked < len(found) {
		list.Cursor = found[looked-1].ID
	}
	states, err := s.states(ctx, page)
	for i, st := range states {
		list.Tenants = append(list.Tenants, s.view(page[i].ID, st))
	}
	return list, apiError(err)
}

// tenantsOfEach returns how many ids to read from each partition to find the first `most` tenants
// of all partitions with near certainty: the mean, and four times its standard deviation, because
// tenants are spread by a hash. All partitions together read about most + 4√(most × partitions)
// ids, and 4 for each partition.
func tenantsOfEach(most, partitions int) int {
	mean := float64(most) / float64(partitions)
	return min(most+1, int(mean+4*math.Sqrt(mean))+4)
}

// listed returns the first tenants of found that are not implicit, at most limit. looked is how
// many tenants of found it has looked at.
func (s *tenants) listed(
	ctx context.Context, found []ledger.TenantRef, limit int,
) (page []ledger.TenantRef, looked int, err error) {
	for chunk := range slices.Chunk(found, 100) {
		implicit, err := ledger.ImplicitTenants(ctx, s.conn.Cmd, chunk)
		if err != nil {
			return nil, 0, err
		}
		for i, t := range chunk {
			looked++
			if implicit[i] {
				continue
			}
			if page = append(page, t); len(page) == limit {
				return page, looked, nil
			}
		}
	}
	return page, looked, nil
}

// states reads the states of several tenants concurrently.
func (s *tenants) states(ctx context.Context, of []ledger.TenantRef) ([]ledger.TenantState, error) {
	states := make([]ledger.TenantState, len(of))
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(maxConcurrentReads)
	for i, t := range of {
		reads.Go(func() (err error) {
			states[i], err = s.state(ctx, t.Partition, t.ID)
			return err
		})
	}
	return states, reads.Wait()
}

// maxConcurrentReads is the most tenants of one list, or partitions for one call of Stats, that are
// read concurrently.
const maxConcurrentReads = 8

func (s *tenants) state(ctx context.Context, p keyspace.Partition, tenant string) (ledger.TenantState, error) {
	st, err := ledger.Tenant(ctx, s.conn.Cmd, p, tenant, s.partitionLimit(p))
	if err != nil {
		return st, fmt.Errorf("read tenant %s: %w", tenant, err)
	}
	return st, nil
}

func (s *tenants) view(id string, st ledger.TenantState) api.Tenant {
	t := api.Tenant{
		ID:            id,
		RPS:           st.Settings.RPS,
		Weight:        1,
		BasePriority:  st.Settings.BasePriority,
		Paused:        st.Paused,
		Active:        st.Active,
		Unfinished:    st.Unfinished,
		NonReady:      st.NonReady,
		JobsPerSecond: apivalue.Round(st.PerSecond, 10),
		ActiveTenants: st.ActiveTenants,
		Window: api.TenantWindow{
			Limiter: s.cfg.Limiter, Share: s.cfg.LimiterMode, WindowMS: s.cfg.Rate.Window.Milliseconds(),
			Used: st.Used, Limit: st.Limit, GlobalUsed: st.GlobalUsed, GlobalLimit: st.GlobalLimit,
			NextPermitAt: apivalue.TimeIfAfter(apivalue.Latest(s.cfg.Rate.OwnPermit(st), st.GlobalPermit), st.Now),
		},
		Congestion: api.TenantCongestion{
			Throttles:     st.Throttles,
			Returns:       st.Returns,
			LongestWaitMS: st.LongestWait.Milliseconds(),
			LastAt:        apivalue.TimeIfAfter(st.LastEvent, time.Time{}),
		},
	}
	if st.Settings.Weight != nil {
		t.Weight = *st.Settings.Weight
	}
	if st.Returns > 0 {
		t.Congestion.MeanWaitMS = apivalue.Round(float64(st.Waits.Milliseconds())/float64(st.Returns), 10)
	}
	return t
}
