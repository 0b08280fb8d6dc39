// Package limittest sets limits in Redis, as the leader of the limits does.
package limittest

import (
	"cmp"
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Limit is a global limit, with limits of types.
type Limit struct {
	ledger.Meter
	Permits int64  // in a window, of all partitions together; 0: no limit
	Part    int64  // this partition's part; 0: all
	Share   string // "": static
	Types   []ledger.Limit
}

// None allows everything.
var None = Limit{Meter: ledger.Meter{Window: time.Second}}

// Ever returns a limit of this many permits in a window of about 70 years, so that they are never
// renewed.
func Ever(permits int64) Limit {
	return Limit{Meter: ledger.Meter{Window: 1 << 41 * time.Millisecond}, Permits: permits}
}

// Use gives a partition its part of a limit, and returns how it counts. It has no effect once a process
// leads the limits.
func Use(ctx context.Context, t require.TestingT, c redis.Cmdable, p keyspace.Partition, l Limit) ledger.Meter {
	limits := append([]ledger.Limit{{Total: l.Permits}}, l.Types...)
	terms := ledger.Terms{Share: l.Share, Partitions: 1}
	for _, limit := range limits {
		terms.To = append(terms.To, ledger.Increase{To: limit.Total})
	}
	terms.To[0].To = cmp.Or(l.Part, l.Permits)
	_, err := ledger.SetParts(ctx, c, p, ledger.Order{}, l.Meter, limits, terms)
	require.NoError(t, err)
	return l.Meter
}
