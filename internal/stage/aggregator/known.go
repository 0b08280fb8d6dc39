package aggregator

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/groups"
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

// know reads what a group asked for and where this process's slot stands; nil when the group is gone.
func (p *partition) know(ctx context.Context, group string) (*known, error) {
	if k := p.known.groups[group]; k != nil {
		return k, nil
	}
	var meta, slot *redis.SliceCmd
	_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		meta = pipe.HMGet(ctx, p.p.Group(group), "status", "tenant", "aggregate")
		slot = pipe.HMGet(ctx, p.p.Aggregate(group), "version:"+p.slot, "slot:"+p.slot)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read group %s: %w", group, err)
	}
	text := func(v any) string { s, _ := v.(string); return s }
	if text(meta.Val()[0]) == "" {
		return nil, nil
	}
	plan, err := groups.Plan(p.reducers, text(meta.Val()[2]))
	if err != nil {
		return nil, fmt.Errorf("group %s: %w: run an aggregator that has this reducer", group, err)
	}
	k := &known{tenant: text(meta.Val()[1])}
	k.version, _ = strconv.ParseInt(text(slot.Val()[0]), 10, 64)
	if encoded := text(slot.Val()[1]); encoded == "" {
		k.state = plan.New()
	} else if k.state, err = plan.Decode([]byte(encoded)); err != nil {
		return nil, fmt.Errorf("group %s: %w", group, err)
	}
	return k, nil
}
