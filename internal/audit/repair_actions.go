package audit

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// repairAction mends a finding. Cures with the same key do the same, so that one of them is enough.
// What it does is decided again in Redis, in one step, by how things are then.
type repairAction struct {
	key    string
	result string // what it does
	run    func(context.Context) (bool, error)
}

// addRepair notes what mends a finding of this look.
func (ps *pass) addRepair(f finding, c repairAction) {
	if _, kept := ps.found.details[f]; !kept {
		return // there are too many like it
	}
	if ps.repairs == nil {
		ps.repairs = map[finding]repairAction{}
	}
	ps.repairs[f] = c
}

// groupRepair adds to a group's ledger what it differs by from its states, and puts the group
// on its lists.
func (ps *pass) groupRepair(g *group) (repairAction, bool) {
	differences, sum, counted := map[string]int64{}, int64(0), int64(0)
	add := func(name string, n int64) {
		if n != 0 {
			differences[name] = n
		}
	}
	for _, f := range countFields {
		have := g.among(f.letters)
		sum, counted = sum+g.intField(f.name), counted+have
		add(f.name, have-g.intField(f.name))
	}
	add("reduced", g.counts[ledger.Reduced]-g.intField("reduced"))
	accepted, jobs := g.intField("accepted"), int64(len(g.states)/2)
	// states are wrong themselves: two of three are against them
	if counted != jobs || accepted != jobs && sum != jobs {
		return repairAction{}, false
	}
	add("accepted", jobs-accepted)
	return repairAction{"group " + g.id, "its ledger counts its states, and it is on its lists",
		func(ctx context.Context) (bool, error) {
			return ledger.RepairGroup(ctx, ps.cmd, ps.p, g.id, g.tenant, g.intField("repaired"), differences)
		}}, true
}

func (g *group) among(letters string) (n int64) {
	for _, letter := range []byte(letters) {
		n += g.counts[letter]
	}
	return n
}

// unlistedRepair takes a group that is no more off the lists.
func (ps *pass) unlistedRepair(id, tenant string) repairAction {
	return repairAction{"group " + id, "it is off the list of groups", func(ctx context.Context) (bool, error) {
		return ledger.RepairGroup(ctx, ps.cmd, ps.p, id, tenant, 0, nil)
	}}
}

// counterRepair sets a counter to what was counted.
func (ps *pass) counterRepair(n ledger.Counter) repairAction {
	return repairAction{fmt.Sprint("counter ", n), fmt.Sprintf("%s of %s is %d", n.Name, n.Of, n.Want),
		func(ctx context.Context) (bool, error) {
			return ledger.RepairCounter(ctx, ps.cmd, ps.p, n)
		}}
}

// ownerRepair says whose a group is, where nobody is named, or somebody who has no such group.
func (ps *pass) ownerRepair(g *group, owner string) repairAction {
	key := ps.space.OfGroup(g.id).Owner(g.id)
	return repairAction{"owner " + g.id, "its owner key says " + g.tenant, func(ctx context.Context) (bool, error) {
		if owner == "" {
			return ps.cmd.SetNX(ctx, key, g.tenant, 0).Result()
		}
		has, err := ps.cmd.HGet(ctx, ps.space.OfTenant(owner).Group(g.id), "tenant").Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return false, err
		}
		if has == owner {
			return false, nil // there are two of the name
		}
		err = ps.cmd.Watch(ctx, func(tx *redis.Tx) error {
			if now, err := tx.Get(ctx, key).Result(); err != nil || now != owner {
				return redis.TxFailedErr
			}
			_, err := tx.TxPipelined(ctx, func(p redis.Pipeliner) error { return p.Set(ctx, key, g.tenant, 0).Err() })
			return err
		}, key)
		return err == nil, ignoreConflict(err)
	}}
}

// ignoreConflict passes over that what was watched has moved.
func ignoreConflict(err error) error {
	if errors.Is(err, redis.TxFailedErr) {
		return nil
	}
	return err
}

// codesRepair counts a group's failures by code, where nothing fails or is retried meanwhile.
func (ps *pass) codesRepair(g *group) repairAction {
	return repairAction{"codes " + g.id, "its error codes count its failures", func(ctx context.Context) (bool, error) {
		before, err := ps.readCodes(ctx, g.id)
		if err != nil {
			return false, err
		}
		differences := map[string]int64{}
		command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
			return p.HScan(ctx, ps.p.Failures(g.id), cursor, "", pageSize)
		}
		seen := map[string]bool{} // a scan may yield a field twice
		if err := ps.scan(ctx, command, func(page []string) error {
			for i := 0; i+1 < len(page); i += 2 {
				if code := errorCode(page[i+1]); code != "" && !seen[page[i]] {
					differences["code:"+code]++
				}
				seen[page[i]] = true
			}
			return nil
		}); err != nil {
			return false, err
		}
		after, err := ps.readCodes(ctx, g.id)
		if err != nil || fmt.Sprint(before) != fmt.Sprint(after) {
			return false, err
		}
		for code, n := range before.codes {
			if differences["code:"+code] -= asInt(n); differences["code:"+code] == 0 {
				delete(differences, "code:"+code)
			}
		}
		return ledger.RepairGroup(ctx, ps.cmd, ps.p, g.id, g.tenant, asInt(before.repaired), differences)
	}}
}

type codesReading struct {
	repaired any
	codes    map[string]string
	failures int64
}

func (ps *pass) readCodes(ctx context.Context, id string) (codesReading, error) {
	var hash *redis.SliceCmd
	var all *redis.MapStringStringCmd
	var n *redis.IntCmd
	err := ps.transaction(ctx, func(p redis.Pipeliner) {
		hash, all, n = p.HMGet(ctx, ps.p.Group(id), "repaired"), p.HGetAll(ctx, ps.p.Codes(id)),
			p.HLen(ctx, ps.p.Failures(id))
	})
	if err != nil {
		return codesReading{}, err
	}
	return codesReading{hash.Val()[0], all.Val(), n.Val()}, nil
}

// whyNotRepaired says why nothing mends a violation.
func whyNotRepaired(f finding) string {
	kind, _, _ := strings.Cut(f.key, " ")
	switch {
	case f.law == LawLocation && kind == "key":
		return "somebody else has written it: delete or rename it, and audit again for what was lost with it"
	case f.law == LawConservation || f.law == LawStates || f.law == LawLifecycle && kind == "status":
		return "its states are wrong themselves, and what they were can't be told: cancel the group and " +
			"submit its jobs again"
	case f.law == LawLifecycle && kind == "threshold":
		return "its end was announced and is not taken back; retry runs its failed jobs again"
	case f.law == LawLifecycle:
		return "what was when can't be told; it harms nothing"
	case f.law == LawResults && f.ordinal == noOrdinal:
		return "results that were merged can't be taken apart; its results and failures are exact, its aggregate is not"
	case f.law == LawResults:
		return "what a result was, or whether it was read, can't be told"
	case f.law == LawRegistry && kind == "partition":
		return "its tenant's partition is another one: cancel it and submit its jobs again"
	case f.law == LawRegistry:
		return "there are two of that name, or it does not know its own: expire one of them"
	}
	return "it goes by itself when somebody comes by, or moves too fast to be mended: audit again"
}
