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

// known is what this process remembers of a group, so that it need not be read for each batch.
type cachedGroup struct {
	tenant  string
	version int64
	state   *reducer.State // of this process's slot
	size    int            // bytes of the state when it is encoded
}

// What is remembered at most; a state takes a few times its encoded size.
const (
	maxCachedGroups = 2000
	maxCachedBytes  = 16 << 20
)

// memory holds the groups that are known.
type groupCache struct {
	groups map[string]*cachedGroup
	bytes  int
}

// keep makes room by chance: a group that is still in work is read again.
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

func (m *groupCache) remove(group string) {
	if cached := m.groups[group]; cached != nil {
		m.bytes -= cached.size
		delete(m.groups, group)
	}
}

// know reads what a group asked for and where this process's slot stands; nil when the
// group is gone.
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

// meet reads at once what is not known of several groups. What fails is tried again, and told, when
// the group has its turn.
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

// groupRead is what Redis tells of a group.
type groupReply struct{ group, partial *redis.SliceCmd }

func (p *partitionReducer) queueReads(ctx context.Context, reads []groupReply, ids []string) func(redis.Pipeliner) error {
	return func(pipe redis.Pipeliner) error {
		for i, id := range ids {
			reads[i].group = pipe.HMGet(ctx, p.partition.Group(id), "status", "tenant", "aggregate")
			reads[i].partial = pipe.HMGet(ctx, p.partition.Aggregate(id), "version:"+p.partial, "slot:"+p.partial)
		}
		return nil
	}
}

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
