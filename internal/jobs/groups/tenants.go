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

// SetTenant replaces a tenant's settings and returns the tenant. A pause is not a setting, and
// stays. An unknown tenant becomes known, unless all fields of set are nil.
func (s *Store) SetTenant(ctx context.Context, tenant string, set api.TenantSettings) (api.Tenant, error) {
	if set.InFlight != nil {
		if err := s.checkLayout(); err != nil {
			return api.Tenant{}, err
		}
	}
	return s.changeTenant(ctx, tenant, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.SetTenant(ctx, s.conn.Cmd, p, tenant, ledger.TenantSettings(set))
	})
}

// PatchTenant changes some of a tenant's settings and returns the tenant. An unknown tenant is
// treated as by SetTenant.
func (s *Store) PatchTenant(ctx context.Context, tenant string, patch api.TenantPatch) (api.Tenant, error) {
	if patch.InFlight.Value != nil {
		if err := s.checkLayout(); err != nil {
			return api.Tenant{}, err
		}
	}
	return s.changeTenant(ctx, tenant, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.ChangeTenant(ctx, s.conn.Cmd, p, tenant, patch)
	})
}

// changeTenant calls do, which changes a tenant and may be repeated, and returns the tenant as it is
// afterwards.
func (s *Store) changeTenant(
	ctx context.Context, tenant string, do func(context.Context, keyspace.Partition) error,
) (api.Tenant, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.Tenant{}, err
	}
	p := s.space.OfTenant(tenant)
	if err := retryUnavailable(ctx, func(ctx context.Context) error { return do(ctx, p) }); err != nil {
		return api.Tenant{}, apiError(err)
	}
	st, err := s.tenantState(ctx, p, tenant)
	return s.tenantView(tenant, st), apiError(err)
}

// Tenant returns a tenant that has groups or settings, or is paused. For any other id it returns
// api.ErrNotFound.
func (s *Store) Tenant(ctx context.Context, tenant string) (api.Tenant, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.Tenant{}, err
	}
	st, err := s.tenantState(ctx, s.space.OfTenant(tenant), tenant)
	if err != nil {
		return api.Tenant{}, apiError(err)
	}
	if !st.Known && !st.Paused {
		return api.Tenant{}, unknownTenant(tenant)
	}
	return s.tenantView(tenant, st), nil
}

// PreviewTenant returns the tenant as it would be after PatchTenant, without storing the patch. Its
// errors are those of Tenant.
func (s *Store) PreviewTenant(ctx context.Context, tenant string, patch api.TenantPatch) (api.Tenant, error) {
	if err := checkTenant(ctx, tenant); err != nil {
		return api.Tenant{}, err
	}
	p := s.space.OfTenant(tenant)
	st, err := s.tenantState(ctx, p, tenant)
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
	if patch.InFlight.Given {
		set.InFlight = patch.InFlight.Value
	}
	st, err = ledger.TenantWith(ctx, s.conn.Cmd, p, tenant, s.cfg.Meter, set)
	if err != nil {
		return api.Tenant{}, apiError(fmt.Errorf("preview tenant %s: %w", tenant, err))
	}
	return s.tenantView(tenant, st), nil
}

// tenantsPerCall is the most tenants that one call of Tenants looks at to find those that are not
// implicit, unless the page's limit is higher.
const tenantsPerCall = 1000

// Tenants lists tenants by id. A call reads a bounded number of tenants (shareOf), so a page
// with a cursor may be short. If all is false, it omits implicit tenants (ledger.ImplicitTenants),
// and such a page may be empty. The cursor is the id of the last tenant that the call has looked
// at. A principal of one tenant gets this tenant, if it exists.
func (s *Store) Tenants(ctx context.Context, cursor string, limit int, all bool) (api.TenantList, error) {
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
	found, more, err := ledger.Tenants(ctx, s.conn.Cmd, parts, cursor, shareOf(most, len(parts)))
	if err != nil {
		return list, apiError(err)
	}
	looked := min(most, len(found))
	page := found[:looked]
	if !all {
		if page, looked, err = s.explicitTenants(ctx, page, limit); err != nil {
			return list, apiError(err)
		}
	}
	if more || looked < len(found) {
		list.Cursor = found[looked-1].ID
	}
	states, err := s.tenantStates(ctx, page)
	for i, st := range states {
		list.Tenants = append(list.Tenants, s.tenantView(page[i].ID, st))
	}
	return list, apiError(err)
}

// explicitTenants returns the first tenants of found that are not implicit, at most limit. looked is how
// many tenants of found it has looked at.
func (s *Store) explicitTenants(
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

// tenantStates reads the states of several tenants concurrently.
func (s *Store) tenantStates(ctx context.Context, of []ledger.TenantRef) ([]ledger.TenantState, error) {
	states := make([]ledger.TenantState, len(of))
	return states, concurrently(ctx, len(of), func(ctx context.Context, i int) (err error) {
		states[i], err = s.tenantState(ctx, of[i].Partition, of[i].ID)
		return err
	})
}

func (s *Store) tenantState(ctx context.Context, p keyspace.Partition, tenant string) (ledger.TenantState, error) {
	st, err := ledger.Tenant(ctx, s.conn.Cmd, p, tenant, s.cfg.Meter)
	if err != nil {
		return st, fmt.Errorf("read tenant %s: %w", tenant, err)
	}
	return st, nil
}

func (s *Store) tenantView(id string, st ledger.TenantState) api.Tenant {
	t := api.Tenant{
		ID:            id,
		RPS:           st.Settings.RPS,
		Weight:        1,
		BasePriority:  st.Settings.BasePriority,
		InFlight:      st.Settings.InFlight,
		InFlightNow:   st.Places,
		Paused:        st.Paused,
		Active:        st.Active,
		Unfinished:    st.Unfinished,
		NonReady:      st.NonReady,
		JobsPerSecond: round(st.PerSecond, 10),
		ActiveTenants: st.ActiveTenants,
		Window: api.TenantWindow{
			Limiter: s.cfg.Meter.Limiter, Share: st.Share, WindowMS: s.cfg.Meter.Window.Milliseconds(),
			Used: st.Used, Limit: st.Limit, GlobalUsed: st.GlobalUsed, GlobalLimit: st.GlobalLimit,
			NextPermitAt: timeIfAfter(latestOf(st.OwnPermit(), st.GlobalPermit), st.Now),
		},
		Congestion: api.TenantCongestion{
			Throttles:     st.Throttles,
			Returns:       st.Returns,
			LongestWaitMS: st.LongestWait.Milliseconds(),
			LastAt:        timeIfAfter(st.LastEvent, time.Time{}),
		},
	}
	if st.Settings.Weight != nil {
		t.Weight = *st.Settings.Weight
	}
	if st.Returns > 0 {
		t.Congestion.MeanWaitMS = round(float64(st.Waits.Milliseconds())/float64(st.Returns), 10)
	}
	return t
}

// MaxBusiest is the largest number of tenants that MeasureBusiest stores for a partition, and that
// an answer has.
const MaxBusiest = 100

// busiestPage is about how many active tenants MeasureBusiest reads at once.
const busiestPage = 500

// busiest is the document with the busiest tenants of a partition, as it is stored in Redis.
type busiest struct {
	AsOf    time.Time    `json:"as_of"` // when the first of the partition's tenants was read
	Tenants []api.Tenant `json:"tenants"`
	// Oldest is when the oldest of the next jobs of the busiest tenants was accepted; nil: none waits.
	Oldest *time.Time `json:"oldest,omitempty"`
}

// BusiestEvery is the time between two calls of MeasureBusiest for a partition: a search of 100,000
// active tenants takes 10 s, so that what it finds is at most 30 s old. Of each, the history has
// historyTenants tenants.
const (
	BusiestEvery   = 20 * time.Second
	historyTenants = 20
)

// MeasureBusiest finds the tenants of a partition with the most unfinished jobs among the active
// ones, and stores them for BusiestTenants and TenantHistory. After each page of n tenants it calls pause, which may
// wait to spread the load; after an error of pause it stores nothing.
func (s *Store) MeasureBusiest(
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
	states, err := s.tenantStates(ctx, refs)
	if err != nil {
		return err
	}
	for i, st := range states {
		if st.Unfinished > 0 {
			found.Tenants = append(found.Tenants, s.tenantView(refs[i].ID, st))
		}
	}
	slices.SortFunc(found.Tenants, byBacklog)
	sample := topSample{At: found.AsOf.UnixMilli(), Tenants: map[string][3]float64{}}
	var looked []string
	for _, t := range found.Tenants[:min(len(found.Tenants), historyTenants)] {
		sample.Tenants[t.ID] = [3]float64{float64(t.Unfinished), float64(t.NonReady), t.JobsPerSecond}
		looked = append(looked, t.ID)
	}
	if found.Oldest, err = ledger.OldestWaiting(ctx, s.conn.Cmd, p, looked); err != nil {
		return err
	}
	document, err1 := json.Marshal(found)
	line, err2 := json.Marshal(sample)
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("encode the busiest tenants: %w", err)
	}
	return ledger.StoreBusiest(ctx, s.conn.Cmd, p, document, line)
}

// topSample is the figures of the busiest tenants of a partition at one time.
type topSample struct {
	At      int64                 `json:"t"` // ms
	Tenants map[string][3]float64 `json:"k"` // unfinished, non-ready, jobs per second
}

// TenantHistory returns the figures of the last minutes of a tenant, as far as it was among the
// busiest of its partition. Its errors are those of Tenant.
func (s *Store) TenantHistory(ctx context.Context, tenant string, minutes int) (api.TenantHistory, error) {
	h := api.TenantHistory{StepSeconds: int(BusiestEvery / time.Second), Points: []api.TenantHistoryPoint{}}
	if _, err := s.Tenant(ctx, tenant); err != nil {
		return h, err
	}
	samples, err := ledger.TopSamples(ctx, s.conn.Cmd, s.space.OfTenant(tenant))
	if err != nil {
		return h, apiError(err)
	}
	from := time.Now().Add(-time.Duration(minutes) * time.Minute)
	for _, text := range slices.Backward(samples) {
		var sample topSample
		if json.Unmarshal([]byte(text), &sample) != nil {
			continue // of another version
		}
		at := time.UnixMilli(sample.At).UTC()
		if v, ok := sample.Tenants[tenant]; ok && !at.Before(from) {
			h.Points = append(h.Points, api.TenantHistoryPoint{
				T: at, Unfinished: int64(v[0]), NonReady: int64(v[1]), JobsPerSecond: v[2],
			})
		}
	}
	return h, nil
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
func (s *Store) BusiestTenants(ctx context.Context, limit int) (api.TenantList, error) {
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
	all, err := s.readBusiest(ctx)
	if err != nil {
		return list, apiError(err)
	}
	for _, found := range all {
		list.Tenants = append(list.Tenants, found.Tenants...)
		if list.AsOf == nil || found.AsOf.Before(*list.AsOf) {
			list.AsOf = &found.AsOf
		}
	}
	slices.SortFunc(list.Tenants, byBacklog)
	list.Tenants = list.Tenants[:min(len(list.Tenants), limit, MaxBusiest)]
	return list, nil
}

// readBusiest returns what MeasureBusiest has stored last, of each partition that has it.
func (s *Store) readBusiest(ctx context.Context) (all []busiest, err error) {
	parts := s.space.All()
	documents := make([][]byte, len(parts))
	if err := concurrently(ctx, len(parts), func(ctx context.Context, i int) (err error) {
		documents[i], err = ledger.Busiest(ctx, s.conn.Cmd, parts[i])
		return err
	}); err != nil {
		return nil, err
	}
	for i, document := range documents {
		if document == nil {
			continue
		}
		var found busiest
		if err := json.Unmarshal(document, &found); err != nil {
			return nil, fmt.Errorf("decode the busiest tenants of partition %d: %w", parts[i].Index(), err)
		}
		all = append(all, found)
	}
	return all, nil
}
