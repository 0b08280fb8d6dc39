package groups

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

const (
	mapAge      = 2 * time.Second // how long a map is shown again without reading the group
	maxKeptMaps = 64              // maps that are kept; one has 72 KB at most
)

// jobMaps shows the states of groups' jobs.
type jobMaps struct {
	*access
	recent recent[api.JobMap] // by tenant, group and number of buckets
}

func newJobMaps(a *access) *jobMaps {
	return &jobMaps{access: a, recent: recent[api.JobMap]{age: mapAge, most: maxKeptMaps}}
}

// JobMap counts a group's jobs by state in this many buckets of consecutive ordinals, or in one
// bucket a job if the group has fewer jobs. The counts may be two seconds old, because they are
// reused: the states of a million jobs have 2 MB.
func (k *jobMaps) JobMap(ctx context.Context, id string, buckets int) (m api.JobMap, err error) {
	p, tenant, err := k.locateGroup(ctx, id)
	if err != nil {
		return m, err
	}
	key := strings.Join([]string{tenant, id, strconv.Itoa(buckets)}, "/") // ids have no slash
	m, err = k.recent.get(ctx, key, func(api.JobMap) bool { return true }, func() (api.JobMap, error) {
		return ledger.ReadJobMap(ctx, k.conn.Cmd, p, id, int64(buckets))
	})
	if err != nil {
		return api.JobMap{}, apiError(err)
	}
	m.Buckets = slices.Clone(m.Buckets)
	return m, nil
}
