package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"
)

// loads are what types count, and what lies there by the tenants' tallies.
type loads struct {
	waiting, nonReady map[string]int64
	prints            map[string]uint64 // of the tenants that add to it
}

// counters holds the counters of tenants and of types against what they count.
func (l *look) counters(ctx context.Context) error {
	before, err := l.openPrint(ctx)
	if err != nil {
		return err
	}
	sum := loads{waiting: map[string]int64{}, nonReady: map[string]int64{}, prints: map[string]uint64{}}
	names := slices.Sorted(maps.Keys(l.tenants))
	err = l.tallies(ctx, names, func(t *tenant, y tally) {
		l.tenant(t.name, y)
		if len(t.groups) == 0 && len(y.nonReady) == 0 {
			return
		}
		sum.prints[t.name] = y.print
		for typ, n := range y.waiting {
			sum.waiting[typ] += n
		}
		for typ, n := range y.nonReady {
			sum.nonReady[typ] += n
		}
	})
	if err != nil {
		return err
	}
	for typ := range sum.waiting {
		l.types[typ] = true
	}
	for typ := range sum.nonReady {
		l.types[typ] = true
	}
	types := slices.Sorted(maps.Keys(l.types))
	have, err := l.loads(ctx, types)
	if err != nil {
		return err
	}
	// When all is as it was before, then so it was when the types were asked.
	still := true
	err = l.tallies(ctx, slices.Sorted(maps.Keys(sum.prints)), func(t *tenant, y tally) {
		still = still && y.print == sum.prints[t.name]
	})
	if err != nil {
		return err
	}
	after, err := l.openPrint(ctx)
	if err != nil || !still || before != after {
		return err
	}
	for i, typ := range types {
		if l.doubtfulTypes[typ] {
			continue
		}
		for _, c := range []struct {
			name       string
			have, want int64
		}{{"waiting", have[i][0], sum.waiting[typ]}, {"non_ready", have[i][1], sum.nonReady[typ]}} {
			if c.have != c.want {
				l.found.add(finding{Load, "", none, fmt.Sprint(typ, c.name, c.have-c.want)}, "type %s counts %d jobs as %s, but %d are", typ, c.have, c.name, c.want)
			}
		}
	}
	return nil
}

// tenant reports what is wrong with a tenant's counters.
func (l *look) tenant(name string, y tally) {
	if !y.whole || l.doubtfulTenants[name] {
		return
	}
	for i, counter := range counterNames {
		if y.have[i] != y.want[i] {
			l.found.add(finding{Load, "", none, fmt.Sprint(name, counter, y.have[i]-y.want[i])}, "tenant %s counts %d jobs as %s, but %d are", name, y.have[i], counter, y.want[i])
		}
	}
	if active := y.have[1] > 0; active != y.inSet {
		l.found.add(finding{Load, "", none, fmt.Sprint(name, "set", active)}, "tenant %s has %d active jobs, but its being in the active set is %t", name, y.have[1], y.inSet)
	}
}

// openPrint changes when a group becomes open or ends.
func (l *look) openPrint(ctx context.Context) (string, error) {
	var card *redis.IntCmd
	var newest *redis.ZSliceCmd
	err := l.atOnce(ctx, func(p redis.Pipeliner) {
		card, newest = p.ZCard(ctx, l.p.Open()), p.ZRevRangeWithScores(ctx, l.p.Open(), 0, 0)
	})
	return fmt.Sprint(card.Val(), newest.Val()), err
}

// loads reads what types count as waiting and as non-ready.
func (l *look) loads(ctx context.Context, types []string) ([][2]int64, error) {
	var all [][2]int64
	for page := range slices.Chunk(types, pageSize) {
		cmds := make([]*redis.SliceCmd, len(page))
		err := l.inTurn(ctx, func(p redis.Pipeliner) {
			for i, typ := range page {
				cmds[i] = p.HMGet(ctx, l.p.Load(typ), "waiting", "non_ready")
			}
		})
		if err != nil {
			return nil, err
		}
		for _, c := range cmds {
			all = append(all, [2]int64{number(c.Val()[0]), number(c.Val()[1])})
		}
	}
	return all, nil
}
