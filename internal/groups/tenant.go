package groups

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups/apivalue"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// tenants shows tenants and changes their settings.
type tenants struct{ *access }

// SetTenant replaces a tenant's settings and returns the tenant. Pausing is not a setting, and
// stays. An unknown tenant becomes known, unless all settings are the defaults.
func (s *tenants) SetTenant(ctx context.Context, tenant string, set api.TenantSettings) (api.Tenant, error) {
	return s.change(ctx, tenant, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.SetTenant(ctx, s.conn.Cmd, p, tenant, ledger.TenantSettings(set))
	})
}

// PatchTenant changes some of a tenant's settings and returns the tenant. Otherwise it is as
// SetTenant.
func (s *tenants) PatchTenant(ctx context.Context, tenant string, patch api.TenantPatch) (api.Tenant, error) {
	return s.change(ctx, tenant, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.ChangeTenant(ctx, s.conn.Cmd, p, tenant, patch)
	})
}

// change changes a tenant by do, which may be repeated, and returns the tenant.
func (s *tenants) change(
	ctx context.Context, tenant string, do func(context.Context, keyspace.Partition) error,
) (api.Tenant, error) {
	p := s.space.OfTenant(tenant)
	if err := retryUnavailable(ctx, func(ctx context.Context) error { return do(ctx, p) }); err != nil {
		return api.Tenant{}, apiError(err)
	}
	st, err := s.state(ctx, p, tenant)
	return s.view(tenant, st), apiError(err)
}

// Tenant returns a tenant that has groups or settings or is paused, and api.ErrNotFound for any
// other.
func (s *tenants) Tenant(ctx context.Context, tenant string) (api.Tenant, error) {
	st, err := s.state(ctx, s.space.OfTenant(tenant), tenant)
	if err != nil {
		return api.Tenant{}, apiError(err)
	}
	if !st.Known && !st.Paused {
		return api.Tenant{}, fmt.Errorf("tenant %s: has neither groups nor settings: %w", tenant, api.ErrNotFound)
	}
	return s.view(tenant, st), nil
}

// Tenants lists tenants by id. The cursor is the last id of the page before.
func (s *tenants) Tenants(ctx context.Context, cursor string, limit int) (api.TenantList, error) {
	list := api.TenantList{Tenants: []api.Tenant{}}
	if cursor != "" && !api.ValidID(cursor) {
		return list, badCursor()
	}
	var page []tenantAt
	for _, p := range s.space.All() {
		ids, err := ledger.Tenants(ctx, s.conn.Cmd, p, cursor, limit+1)
		if err != nil {
			return list, apiError(err)
		}
		for _, id := range ids {
			page = append(page, tenantAt{id, p})
		}
	}
	slices.SortFunc(page, func(a, b tenantAt) int { return strings.Compare(a.id, b.id) })
	if len(page) > limit {
		page = page[:limit]
		list.Cursor = page[limit-1].id
	}
	states, err := s.states(ctx, page)
	for i, st := range states {
		list.Tenants = append(list.Tenants, s.view(page[i].id, st))
	}
	return list, apiError(err)
}

// tenantAt is a tenant and its partition.
type tenantAt struct {
	id string
	p  keyspace.Partition
}

// states reads the states of several tenants at the same time.
func (s *tenants) states(ctx context.Context, of []tenantAt) ([]ledger.TenantState, error) {
	states := make([]ledger.TenantState, len(of))
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(maxConcurrentReads)
	for i, t := range of {
		reads.Go(func() (err error) {
			states[i], err = s.state(ctx, t.p, t.id)
			return err
		})
	}
	return states, reads.Wait()
}

// maxConcurrentReads is how many scripts run at the same time to read one list.
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
