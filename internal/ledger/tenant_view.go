package ledger

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Tenants returns the first n known tenants of a partition whose id is greater than after, ordered
// by id; after "" means from the first one on.
func Tenants(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, after string, n int,
) ([]string, error) {
	low := "-"
	if after != "" {
		low = "(" + after
	}
	ids, err := c.ZRangeByLex(ctx, p.Tenants(), &redis.ZRangeBy{Min: low, Max: "+", Count: int64(n)}).Result()
	if err != nil {
		return nil, fmt.Errorf("list tenants of partition %d: %w", p.Index(), err)
	}
	return ids, nil
}

// OwnPermit returns when the tenant's own limit or share allows its next permit. With elastic
// shares a tenant that has used its share may borrow; then only the time until which the tenant is
// rate-limited counts.
func (r Rate) OwnPermit(st TenantState) time.Time {
	if r.Share == ShareElastic && st.Settings.RPS == nil || st.RateLimitedUntil.After(st.NextPermit) {
		return st.RateLimitedUntil
	}
	return st.NextPermit
}

// Bound returns speed, in jobs per second, or the highest speed that the tenant's limits allow if
// that is lower.
func (r Rate) Bound(st TenantState, speed float64) float64 {
	bound := func(perSecond float64) {
		if perSecond > 0 {
			speed = min(speed, perSecond)
		}
	}
	bound(r.PerSecond(st.GlobalLimit))
	switch {
	case st.Settings.RPS != nil:
		bound(*st.Settings.RPS)
	case r.Share != ShareElastic: // with elastic shares a tenant may use what others leave
		bound(r.PerSecond(st.Limit))
	}
	return speed
}

// PerSecond converts permits per window to permits per second, rounded to three decimals.
func (r Rate) PerSecond(permits int64) float64 {
	window := r.Window.Milliseconds()
	if window <= 0 {
		return 0
	}
	return math.Round(float64(permits)*1000/float64(window)*1000) / 1000
}
