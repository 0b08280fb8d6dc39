package groups

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

const (
	mapAge      = 2 * time.Second // how long a map is shown again without reading the group
	maxKeptMaps = 64              // maps that are kept; one has 72 KB at most
)

// jobMaps keeps the latest maps of groups. Callers that ask for the same map at the same time share
// one reading of the group.
type jobMaps struct {
	*access
	reading keyedMutex // by the same keys
	mu      sync.Mutex
	kept    map[string]keptMap
}

type keptMap struct {
	api.JobMap
	until time.Time
}

// get returns the map that is kept under a key, if it is not too old.
func (k *jobMaps) get(key string, now time.Time) (api.JobMap, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	m, ok := k.kept[key]
	return m.JobMap, ok && now.Before(m.until)
}

// put keeps a map, unless too many that are not too old are kept.
func (k *jobMaps) put(key string, m api.JobMap, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.kept == nil {
		k.kept = map[string]keptMap{}
	}
	for other, old := range k.kept {
		if !now.Before(old.until) {
			delete(k.kept, other)
		}
	}
	if len(k.kept) < maxKeptMaps {
		k.kept[key] = keptMap{m, now.Add(mapAge)}
	}
}

// JobMap returns the map of a group's jobs with this many buckets, or one a job if the group has
// fewer jobs. It may be two seconds old: a group of a million jobs has 2 MB of states.
func (k *jobMaps) JobMap(ctx context.Context, id string, buckets int) (m api.JobMap, err error) {
	p, tenant, err := k.locateGroup(ctx, id)
	if err != nil {
		return m, err
	}
	key := strings.Join([]string{tenant, id, strconv.Itoa(buckets)}, "/") // ids have no slash
	lock, err := k.reading.lock(ctx, key)
	if err != nil {
		return m, apiError(err)
	}
	defer k.reading.unlock(lock)
	m, fresh := k.get(key, time.Now())
	if !fresh {
		if m, err = ledger.ReadJobMap(ctx, k.conn.Cmd, p, id, int64(buckets)); err != nil {
			return api.JobMap{}, apiError(err)
		}
		k.put(key, m, time.Now())
	}
	m.Buckets = slices.Clone(m.Buckets)
	return m, nil
}
