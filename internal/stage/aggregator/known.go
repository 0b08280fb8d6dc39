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
type known struct {
	tenant  string
	version int64
	state   *reducer.State // of this process's slot
	size    int            // bytes of the state when it is encoded
}

// What is remembered at most; a state takes a few times its encoded size.
const (
	maxKnown      = 2000
	maxKnownBytes = 16 << 20
)

// memory holds the groups that are known.
type memory struct {
	groups map[string]*known
	bytes  int
}

// keep makes room by chance: a group that is still in work is read again.
func (m *memory) keep(group string, k *known) {
	for other := range m.groups {
		if len(m.groups) < maxKnown && m.bytes+k.size <= maxKnownBytes {
			break
		}
		m.forget(other)
	}
	m.forget(group)
	m.groups[group] = k
	m.bytes += k.size
}

func (m *memory) forget(group string) {
	if k := m.groups[group]; k != nil {
		m.bytes -= k.size
		delete(m.groups, group)
	}
}

// know reads what a group asked for and where this process's slot stands; nil when the
// group is gone.
func (p *partitionReducer) know(ctx context.Context, group string) (*known, error) {
	if k := p.cache.groups[group]; k != nil {
		return k, nil
	}
	var reads [1]groupRead
	if _, err := p.conn.Cmd.Pipelined(ctx, p.readInto(ctx, reads[:], []string{group})); err != nil {
		return nil, fmt.Errorf("read group %s: %w", group, err)
	}
	return p.decode(group, reads[0])
}

// meet reads at once what is not known of several groups. What fails is tried again, and told, when
// the group has its turn.
func (p *partitionReducer) meet(ctx context.Context, parts []*portion) {
	var fresh []string
	for _, part := range parts {
		if p.cache.groups[part.group] == nil && !slices.Contains(fresh, part.group) {
			fresh = append(fresh, part.group)
		}
	}
	if len(fresh) < 2 {
		return
	}
	reads := make([]groupRead, len(fresh))
	_, _ = p.conn.Cmd.Pipelined(ctx, p.readInto(ctx, reads, fresh))
	for i, group := range fresh {
		if reads[i].meta.Err() != nil || reads[i].slot.Err() != nil {
			continue
		}
		if k, err := p.decode(group, reads[i]); err == nil && k != nil {
			p.cache.keep(group, k)
		}
	}
}

// groupRead is what Redis tells of a group.
type groupRead struct{ meta, slot *redis.SliceCmd }

func (p *partitionReducer) readInto(ctx context.Context, reads []groupRead, ids []string) func(redis.Pipeliner) error {
	return func(pipe redis.Pipeliner) error {
		for i, id := range ids {
			reads[i].meta = pipe.HMGet(ctx, p.partition.Group(id), "status", "tenant", "aggregate")
			reads[i].slot = pipe.HMGet(ctx, p.partition.Aggregate(id), "version:"+p.slot, "slot:"+p.slot)
		}
		return nil
	}
}

func (p *partitionReducer) decode(group string, r groupRead) (*known, error) {
	text := func(v any) string { s, _ := v.(string); return s }
	meta, slot := r.meta.Val(), r.slot.Val()
	if text(meta[0]) == "" {
		return nil, nil
	}
	plan, err := aggregate.Plan(p.reducers, text(meta[2]))
	if err != nil {
		return nil, fmt.Errorf("group %s: %w: run an aggregator that has this reducer", group, err)
	}
	k := &known{tenant: text(meta[1])}
	k.version, _ = strconv.ParseInt(text(slot[0]), 10, 64)
	encoded := text(slot[1])
	if k.size = len(encoded); encoded == "" {
		k.state = plan.New()
	} else if k.state, err = plan.Decode([]byte(encoded)); err != nil {
		return nil, fmt.Errorf("group %s: %w", group, err)
	}
	return k, nil
}
