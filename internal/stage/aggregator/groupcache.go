package aggregator

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/aggregate"
	"github.com/bulkaction/bulkaction/reducer"
)

// cachedGroup is what this process keeps in memory of a group, so that it need not read it from
// Redis for each batch.
type cachedGroup struct {
	tenant  string
	version int64          // version of the partial aggregate that state belongs to
	state   *reducer.State // content of the partial aggregate
	size    int            // bytes of the encoded state
}

// maxCachedGroups and maxCachedBytes bound the cache. The bytes are those of encoded states; in
// memory, a state takes a few times as many.
const (
	maxCachedGroups = 2000
	maxCachedBytes  = 16 << 20
)

// groupCache holds the cached groups of one partition.
type groupCache struct {
	groups map[string]*cachedGroup
	bytes  int // sum of the groups' sizes
}

// put stores a group. If need be, it removes other groups at random; a removed group is loaded
// again with its next batch.
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

// loadGroup returns the reducers and the partial aggregate of a group, from the cache or from
// Redis. It returns nil when the group no longer exists.
func (p *partitionReducer) loadGroup(ctx context.Context, group string) (*cachedGroup, error) {
	if cached := p.cache.groups[group]; cached != nil {
		return cached, nil
	}
	var reads [1]groupReply
	if _, err := p.conn.Cmd.Pipelined(ctx, p.queueReads(ctx, reads[:], []string{group})); err != nil {
		return nil, fmt.Errorf("read group %s: %w", group, err)
	}
	return p.decodeGroup(group, reads[0])
}

// prefetchGroups loads the groups of batches that are not cached, in one round trip. It ignores
// errors: loadGroup loads such a group again and returns the error.
func (p *partitionReducer) prefetchGroups(ctx context.Context, batches []*batch) {
	var missing []string
	for _, b := range batches {
		if p.cache.groups[b.group] == nil && !slices.Contains(missing, b.group) {
			missing = append(missing, b.group)
		}
	}
	if len(missing) < 2 {
		return
	}
	reads := make([]groupReply, len(missing))
	_, _ = p.conn.Cmd.Pipelined(ctx, p.queueReads(ctx, reads, missing))
	for i, group := range missing {
		if reads[i].group.Err() != nil || reads[i].partial.Err() != nil {
			continue
		}
		if cached, err := p.decodeGroup(group, reads[i]); err == nil && cached != nil {
			p.cache.put(group, cached)
		}
	}
}

// groupReply holds the replies of Redis about one group: its fields, and this process's partial
// aggregate.
type groupReply struct{ group, partial *redis.SliceCmd }

// queueReads returns a function that adds the reads of the groups ids to a pipeline. Their replies
// go to reads.
func (p *partitionReducer) queueReads(
	ctx context.Context, reads []groupReply, ids []string,
) func(redis.Pipeliner) error {
	return func(pipe redis.Pipeliner) error {
		for i, id := range ids {
			reads[i].group = pipe.HMGet(ctx, p.partition.Group(id), "status", "tenant", "aggregate")
			reads[i].partial = pipe.HMGet(ctx, p.partition.Aggregate(id), "version:"+p.partial, "partial:"+p.partial)
		}
		return nil
	}
}

// decodeGroup makes a cachedGroup of the replies of Redis; nil when the group no longer exists. It
// returns an error when this process does not know one of the group's reducers.
func (p *partitionReducer) decodeGroup(group string, r groupReply) (*cachedGroup, error) {
	text := func(v any) string { s, _ := v.(string); return s }
	fields, partial := r.group.Val(), r.partial.Val()
	if text(fields[0]) == "" {
		return nil, nil
	}
	plan, err := aggregate.Plan(p.reducers, text(fields[2]))
	if err != nil {
		return nil, fmt.Errorf("group %s: %w: run an aggregator that has this reducer", group, err)
	}
	cached := &cachedGroup{tenant: text(fields[1])}
	cached.version, _ = strconv.ParseInt(text(partial[0]), 10, 64)
	encoded := text(partial[1])
	if cached.size = len(encoded); encoded == "" {
		cached.state = plan.New()
	} else if cached.state, err = plan.Decode([]byte(encoded)); err != nil {
		return nil, fmt.Errorf("group %s: %w", group, err)
	}
	return cached, nil
}
