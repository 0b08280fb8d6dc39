package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// loads are what types count, and what lies there by the tenants' tallies.
type loads struct {
	waiting, nonReady map[string]int64
	prints            map[string]uint64 // of the tenants that add to it
}

// counters holds the counters of tenants and of types against what they count.
func (l *look) counters(ctx context.Context) error {
	open, err := l.openGroups(ctx)
	if err != nil {
		return err
	}
	if err := l.newcomers(ctx); err != nil {
		return err
	}
	handedOut, err := l.handedOut(ctx)
	if err != nil {
		return err
	}
	sum := loads{waiting: map[string]int64{}, nonReady: map[string]int64{}, prints: map[string]uint64{}}
	if err := l.tallies(ctx, slices.Sorted(maps.Keys(l.tenants)), func(t *tenant, y tally) {
		l.tenant(t.name, y)
		sum.add(t, y)
	}); err != nil {
		return err
	}
	types := slices.Sorted(maps.Keys(l.types))
	have, err := l.loads(ctx, types)
	if err != nil {
		return err
	}
	// When all is again as it was, it was so when the types were asked.
	still := true
	if err := l.tallies(ctx, slices.Sorted(maps.Keys(sum.prints)), func(t *tenant, y tally) {
		still = still && y.print == sum.prints[t.name]
	}); err != nil {
		return err
	}
	handedOutNow, err := l.handedOut(ctx)
	if err != nil {
		return err
	}
	openNow, err := l.openGroups(ctx)
	if err != nil || !still || handedOutNow != handedOut || openNow != open {
		return err
	}
	for i, typ := range types {
		l.load(typ, "waiting", have[i][0], sum.waiting[typ])
		l.load(typ, "non_ready", have[i][1], sum.nonReady[typ])
	}
	return nil
}

func (s *loads) add(t *tenant, y tally) {
	if len(t.groups) == 0 && len(y.nonReady) == 0 {
		return
	}
	s.prints[t.name] = y.print
	for typ, n := range y.waiting {
		s.waiting[typ] += n
	}
	for typ, n := range y.nonReady {
		s.nonReady[typ] += n
	}
}

// load reports what is wrong with a type's counter.
func (l *look) load(typ, counter string, have, want int64) {
	if have != want && !l.doubtfulTypes[typ] {
		f := finding{Load, "", none, fmt.Sprint(typ, counter, have-want)}
		l.found.add(f, "type %s counts %d jobs as %s, but %d are", typ, have, counter, want)
		l.mend(f, l.cureCounter(ledger.Counter{Of: typ, Name: counter, Have: have, Want: want}))
	}
}

// tenant reports what is wrong with a tenant's counters.
func (l *look) tenant(name string, y tally) {
	if !y.whole || l.doubtfulTenants[name] {
		return
	}
	for i, counter := range counterNames {
		if y.have[i] != y.want[i] {
			f := finding{Load, "", none, fmt.Sprint(name, counter, y.have[i]-y.want[i])}
			l.found.add(f, "tenant %s counts %d jobs as %s, but %d are", name, y.have[i], counter, y.want[i])
			l.mend(f, l.cureCounter(ledger.Counter{
				Tenant: true,
				Of:     name,
				Name:   counter,
				Have:   y.have[i],
				Want:   y.want[i],
			}))
		}
	}
	if active := y.have[1] > 0 && !y.paused; active != y.inSet {
		f := finding{Load, "", none, fmt.Sprint(name, "set", active)}
		l.found.add(f, "tenant %s has %d active jobs, but its being in the active set is %t", name, y.have[1], y.inSet)
		l.mend(f, l.cureCounter(ledger.Counter{
			Tenant: true,
			Of:     name,
			Name:   counterNames[1],
			Have:   y.have[1],
			Want:   y.have[1],
		}))
	}
}

// newcomers adds the tenants and types of groups that were created since the look began.
func (l *look) newcomers(ctx context.Context) error {
	return l.ranked(ctx, l.p.Open(), func(ids []string) error {
		for page := range slices.Chunk(ids, pageSize) {
			cmds := make([]*redis.SliceCmd, len(page))
			err := l.inTurn(ctx, func(p redis.Pipeliner) {
				for i, id := range page {
					cmds[i] = p.HMGet(ctx, l.p.Group(id), "tenant", "types")
				}
			})
			if err != nil {
				return err
			}
			for _, c := range cmds {
				if tenant := text(c.Val()[0]); tenant != "" {
					l.tenants[tenant] = true
				}
				for _, typ := range split(text(c.Val()[1])) {
					l.types[typ] = true
				}
			}
		}
		return nil
	})
}

// openGroups changes when a group becomes open or ends.
func (l *look) openGroups(ctx context.Context) (string, error) {
	var card *redis.IntCmd
	var newest *redis.ZSliceCmd
	err := l.atOnce(ctx, func(p redis.Pipeliner) {
		card, newest = p.ZCard(ctx, l.p.Open()), p.ZRevRangeWithScores(ctx, l.p.Open(), 0, 0)
	})
	return fmt.Sprint(card.Val(), newest.Val()), err
}

// handedOut changes when a job becomes ready. Counters alone don't tell of one that was taken back
// and handed out again.
func (l *look) handedOut(ctx context.Context) (string, error) {
	var ids strings.Builder
	for page := range slices.Chunk(slices.Sorted(maps.Keys(l.types)), pageSize/5) {
		newest := make([]*redis.XMessageSliceCmd, len(page))
		err := l.inTurn(ctx, func(p redis.Pipeliner) {
			for i, typ := range page {
				newest[i] = p.XRevRangeN(ctx, l.p.Ready(typ), "+", "-", 1)
			}
		})
		if err != nil {
			return "", err
		}
		for i, c := range newest {
			for _, e := range c.Val() {
				ids.WriteString(page[i] + " " + e.ID + "\n")
			}
		}
	}
	return ids.String(), nil
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
