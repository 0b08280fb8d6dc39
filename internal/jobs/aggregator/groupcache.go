package aggregator

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/jobs/aggregate"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/reducer"
)

// cachedGroup is what this process keeps in memory of a group: this process's partial aggregate, so
// that it need not be read from Redis for each batch.
type cachedGroup struct {
	tenant  string
	version int64          // version of the partial aggregate that state belongs to
	state   *reducer.State // content of the partial aggregate
	size    int            // bytes of the encoded state
}

// maxCachedGroups and maxCachedBytes bound the cache of one partition; one larger group is cached
// alone. The bytes are those of encoded states; in memory, a state takes a few times as many.
const (
	maxCachedGroups = 2000
	maxCachedBytes  = 16 << 20
)

// groupCache holds the cached groups of one partition.
type groupCache struct {
	groups map[string]*cachedGroup
	bytes  int // sum of the groups' sizes
}

// put adds a group to the cache. If the cache is full, it removes other groups at random; a removed
// group is read from Redis again with its next batch.
func (m *groupCache) put(group string, cached *cachedGroup) {
	for other := range m.groups {
		if len(m.groups) < maxCachedGroups && m.bytes+cached.size <= maxCachedBytes {
			break
		}
		m.remove(other)
	}
	m.remove(group)
	m.groups[group] = cached
	m.bytes += cached.size
}

// remove removes a group, if it is there.
func (m *groupCache) remove(group string) {
	if cached := m.groups[group]; cached != nil {
		m.bytes -= cached.size
		delete(m.groups, group)
	}
}

// loadGroup returns a group with its tenant and its partial aggregate, from the cache or from
// Redis. It does not add the group to the cache. It returns nil when the group no longer exists.
func (p *partitionReducer) loadGroup(ctx context.Context, group string) (*cachedGroup, error) {
	if cached := p.cache.groups[group]; cached != nil {
		return cached, nil
	}
	read := ledger.ReadPartials(ctx, p.Conn.Cmd, p.partition, p.partial, []string{group})
	return p.decodeGroup(group, read[0])
}

// cacheGroups reads from Redis, in one round trip, those groups of batches that are not in the
// cache, and adds them to it. If there is only one such group, it does nothing. It ignores errors:
// loadGroup reads such a group again and returns the error.
func (p *partitionReducer) cacheGroups(ctx context.Context, batches []*batch) {
	var missing []string
	for _, b := range batches {
		if p.cache.groups[b.group] == nil && !slices.Contains(missing, b.group) {
			missing = append(missing, b.group)
		}
	}
	if len(missing) < 2 {
		return
	}
	for i, read := range ledger.ReadPartials(ctx, p.Conn.Cmd, p.partition, p.partial, missing) {
		if cached, err := p.decodeGroup(missing[i], read); err == nil && cached != nil {
			p.cache.put(missing[i], cached)
		}
	}
}

// decodeGroup makes a cachedGroup from read: the tenant, the aggregates and one partial aggregate
// of the group in Redis. It returns nil when the group no longer exists. The error says that it
// could not be read or decoded, or that this process does not know one of its reducers.
func (p *partitionReducer) decodeGroup(group string, read ledger.PartialAggregate) (*cachedGroup, error) {
	if read.Err != nil || !read.Exists {
		return nil, read.Err
	}
	plan, err := aggregate.Plan(p.reducers, read.Aggregates)
	if err != nil {
		return nil, fmt.Errorf("group %s: %w: run an aggregator that has this reducer", group, err)
	}
	cached := &cachedGroup{tenant: read.Tenant, version: read.Version, size: len(read.State)}
	if read.State == "" {
		cached.state = plan.New()
	} else if cached.state, err = plan.Decode([]byte(read.State)); err != nil {
		return nil, fmt.Errorf("group %s: %w", group, err)
	}
	return cached, nil
}
