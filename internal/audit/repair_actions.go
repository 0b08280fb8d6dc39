package audit

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// repairAction repairs a finding. Actions with the same key do the same, so one of them is enough.
type repairAction struct {
	key    string
	result string // what is true after the repair, for the result's detail
	// run returns false if it changed nothing because the data has moved. It compares the data with
	// what the audit saw in the same atomic step that changes them.
	run func(context.Context) (bool, error)
}

// addRepair adds the repair of a finding of this pass.
func (ps *pass) addRepair(f finding, action repairAction) {
	if _, kept := ps.found.details[f]; !kept {
		return // the finding was left out because of the bounds
	}
	if ps.repairs == nil {
		ps.repairs = map[finding]repairAction{}
	}
	ps.repairs[f] = action
}

// groupRepair returns the repair that adds to a group's counts their differences from its states,
// and puts the group on its lists. ok is false if the states themselves may be wrong.
func (ps *pass) groupRepair(g *group) (action repairAction, ok bool) {
	differences, sum, counted := map[string]int64{}, int64(0), int64(0)
	add := func(name string, n int64) {
		if n != 0 {
			differences[name] = n
		}
	}
	for _, f := range countFields {
		have := g.jobsIn(f.letters)
		sum, counted = sum+g.intField(f.name), counted+have
		add(f.name, have-g.intField(f.name))
	}
	add("reduced", g.counts[ledger.Reduced]-g.intField("reduced"))
	accepted, jobs := g.intField("accepted"), int64(len(g.states)/2)
	// The states are trusted if each has a known letter, and if they are as many as the accepted
	// jobs or as the other counts add up to.
	if counted != jobs || accepted != jobs && sum != jobs {
		return repairAction{}, false
	}
	add("accepted", jobs-accepted)
	return repairAction{"group " + g.id, "its counts agree with its states, and it is on its lists",
		func(ctx context.Context) (bool, error) {
			return ledger.RepairGroup(ctx, ps.Cmd, ps.p, g.id, g.tenant, g.intField("repaired"), differences)
		}}, true
}

// jobsIn returns the number of jobs with one of these state letters.
func (g *group) jobsIn(letters string) (n int64) {
	for _, letter := range []byte(letters) {
		n += g.counts[letter]
	}
	return n
}

// unlistedRepair returns the repair that takes a group that doesn't exist off the lists.
func (ps *pass) unlistedRepair(id, tenant string) repairAction {
	return repairAction{"group " + id, "it is off the list of groups", func(ctx context.Context) (bool, error) {
		return ledger.RepairGroup(ctx, ps.Cmd, ps.p, id, tenant, 0, nil)
	}}
}

// counterRepair returns the repair that sets a counter to the recounted value.
func (ps *pass) counterRepair(n ledger.Counter) repairAction {
	return repairAction{fmt.Sprint("counter ", n), fmt.Sprintf("%s of %s is %d", n.Name, n.Of, n.Want),
		func(ctx context.Context) (bool, error) {
			return ledger.RepairCounter(ctx, ps.Cmd, ps.p, n)
		}}
}

// ownerRepair returns the repair that sets the owner key of a group to its tenant. Owner is the
// wrong tenant that the key names, or "". The repair does nothing if that tenant has a group of the
// same id: then nothing says which of the two is right.
func (ps *pass) ownerRepair(g *group, owner string) repairAction {
	key := ps.space.OfGroup(g.id).Owner(g.id)
	return repairAction{"owner " + g.id, "its owner key says " + g.tenant, func(ctx context.Context) (bool, error) {
		if owner == "" {
			return ps.Cmd.SetNX(ctx, key, g.tenant, 0).Result()
		}
		has, err := ps.Cmd.HGet(ctx, ps.space.OfTenant(owner).Group(g.id), "tenant").Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return false, err
		}
		if has == owner {
			return false, nil // two tenants have a group of this id
		}
		err = ps.Cmd.Watch(ctx, func(tx *redis.Tx) error {
			if now, err := tx.Get(ctx, key).Result(); err != nil || now != owner {
				return redis.TxFailedErr
			}
			_, err := tx.TxPipelined(ctx, func(p redis.Pipeliner) error { return p.Set(ctx, key, g.tenant, 0).Err() })
			return err
		}, key)
		return err == nil, ignoreConflict(err)
	}}
}

// ignoreConflict returns err, or nil if err says that a watched key has changed.
func ignoreConflict(err error) error {
	if errors.Is(err, redis.TxFailedErr) {
		return nil
	}
	return err
}

// codesRepair returns the repair that sets a group's error codes to those of its failures. It does
// nothing if a job fails or is retried in between.
func (ps *pass) codesRepair(g *group) repairAction {
	return repairAction{"codes " + g.id, "its error codes count its failures", func(ctx context.Context) (bool, error) {
		before, err := ps.readCodes(ctx, g.id)
		if err != nil {
			return false, err
		}
		differences := map[string]int64{}
		command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
			return p.HScan(ctx, ps.p.Failures(g.id), cursor, "", read.PageSize)
		}
		seen := map[string]bool{} // a scan may yield the same field twice
		if err := ps.Scan(ctx, command, func(page []string) error {
			for i := 0; i+1 < len(page); i += 2 {
				if code := read.ErrorCode(page[i+1]); code != "" && !seen[page[i]] {
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
			if differences["code:"+code] -= read.Int(n); differences["code:"+code] == 0 {
				delete(differences, "code:"+code)
			}
		}
		return ledger.RepairGroup(ctx, ps.Cmd, ps.p, g.id, g.tenant, read.Int(before.repaired), differences)
	}}
}

// codesReading holds a group's error codes as of one instant, and what changes whenever they do.
type codesReading struct {
	repaired any // the version of the group's repairs
	codes    map[string]string
	failures int64
}

// readCodes reads the error codes of a group.
func (ps *pass) readCodes(ctx context.Context, id string) (codesReading, error) {
	var hash *redis.SliceCmd
	var all *redis.MapStringStringCmd
	var n *redis.IntCmd
	err := ps.Transaction(ctx, func(p redis.Pipeliner) {
		hash, all, n = p.HMGet(ctx, ps.p.Group(id), "repaired"), p.HGetAll(ctx, ps.p.Codes(id)),
			p.HLen(ctx, ps.p.Failures(id))
	})
	if err != nil {
		return codesReading{}, err
	}
	return codesReading{hash.Val()[0], all.Val(), n.Val()}, nil
}

// whyNotRepaired says why a finding can't be repaired, and what the operator can do.
func whyNotRepaired(f finding) string {
	kind, _, _ := strings.Cut(f.key, " ")
	switch {
	case f.law == LawLocation && kind == "key":
		return "another program has written it: delete or rename it, and audit again to find what was lost"
	case f.law == LawConservation || f.law == LawStates || f.law == LawLifecycle && kind == "status":
		return "its states are wrong and the right ones are not known: cancel the group and submit its jobs again"
	case f.law == LawLifecycle && kind == "threshold":
		return "its end was announced and can't be taken back; the command retry runs its failed jobs again"
	case f.law == LawLifecycle:
		return "the right times are not known; this does no harm"
	case f.law == LawResults && f.ordinal == noOrdinal:
		return "merged results can't be taken apart; its results and failures are exact, its aggregate is not"
	case f.law == LawResults:
		return "it is not known what the result was, or whether it was reduced"
	case f.law == LawRegistry && kind == "partition":
		return "its tenant belongs to another partition: cancel it and submit its jobs again"
	case f.law == LawRegistry:
		return "two groups have this id, or its hash has a wrong id: expire one of them"
	}
	return "the roles correct it soon, or it changes too fast to be repaired: audit again"
}
