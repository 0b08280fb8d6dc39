package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Missing are jobs of a group that have not ended and lie nowhere: Redis, or somebody,
// has lost them.
type Missing struct {
	Partition     int
	Group, Tenant string
	Type          string          // "" when the group has several
	Jobs          []ledger.Missed // by ordinal
}

// Lose ends missing jobs as failed, with code LOST, so that their group comes to its end. It
// returns their ordinals; a job that has moved since it was missed is not lost. Who runs a job
// whose entry in a ready stream is gone could still end it, and is refused from then on.
func Lose(ctx context.Context, conn *redisx.Conn, p keyspace.Partition, m Missing) ([]int64, error) {
	var lost []int64
	for some := range slices.Chunk(m.Jobs, ledger.MaxLose) {
		ended, err := ledger.Lose(ctx, conn.Cmd, p, m.Group, m.Type, some)
		if err != nil {
			return lost, fmt.Errorf("end lost jobs of group %s: %w", m.Group, err)
		}
		lost = append(lost, ended...)
	}
	return lost, nil
}

// missed are the missing jobs of a look, by group. A finding names some of them, this holds all.
type missed map[string]*Missing

func (m missed) add(group, tenant string, types []string, p problem) {
	g := m[group]
	if g == nil {
		g = &Missing{Group: group, Tenant: tenant}
		if len(types) == 1 {
			g.Type = types[0]
		}
		m[group] = g
	}
	g.Jobs = append(g.Jobs, ledger.Missed{Ordinal: p.ordinal, State: p.state})
}

// and keeps what was missed in a later look too, under the same state. The nil set is of no look.
func (m missed) and(later missed) missed {
	if m == nil {
		return later
	}
	both := missed{}
	for id, g := range later {
		before := m[id]
		if before == nil {
			continue
		}
		had := make(map[ledger.Missed]bool, len(before.Jobs))
		for _, j := range before.Jobs {
			had[j] = true
		}
		g.Jobs = slices.DeleteFunc(g.Jobs, func(j ledger.Missed) bool { return !had[j] })
		if len(g.Jobs) > 0 {
			both[id] = g
		}
	}
	return both
}

func (m missed) list(partition int) []Missing {
	var all []Missing
	for _, id := range slices.Sorted(maps.Keys(m)) {
		g := m[id]
		g.Partition = partition
		slices.SortFunc(g.Jobs, func(a, b ledger.Missed) int { return int(a.Ordinal - b.Ordinal) })
		all = append(all, *g)
	}
	return all
}
