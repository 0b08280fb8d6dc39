package repair

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// action repairs a finding. Actions with the same key do the same, so one of them is enough.
type action struct {
	key    string
	result string // what is true after the repair, for the result's detail
	// run returns false if it changed nothing because the data has moved. It compares the data with
	// what the audit saw in the same atomic step that changes them.
	run func(context.Context) (bool, error)
}

// actionFor returns the action that sets right what is wrong.
func (r *partitionRepair) actionFor(wrong audit.Wrong) action {
	switch w := wrong.(type) {
	case audit.WrongGroup:
		return action{"group " + w.Group, "its counts agree with its states, and it is on its lists",
			func(ctx context.Context) (bool, error) {
				return ledger.RepairGroup(ctx, r.Cmd, r.p, w.Group, w.Tenant, w.Repaired, w.Differences)
			}}
	case audit.DeletedGroup:
		return action{"group " + w.Group, "it is off the list of groups",
			func(ctx context.Context) (bool, error) {
				return ledger.RepairGroup(ctx, r.Cmd, r.p, w.Group, w.Tenant, 0, nil)
			}}
	case audit.WrongCounter:
		return action{fmt.Sprint("counter ", w), fmt.Sprintf("%s of %s is %d", w.Name, w.Of, w.Want),
			func(ctx context.Context) (bool, error) {
				return ledger.RepairCounter(ctx, r.Cmd, r.p, ledger.Counter(w))
			}}
	case audit.WrongOwner:
		return action{"owner " + w.Group, "its owner key says " + w.Tenant,
			func(ctx context.Context) (bool, error) { return r.setOwner(ctx, w) }}
	case audit.WrongCodes:
		return action{"codes " + w.Group, "its error codes count its failures",
			func(ctx context.Context) (bool, error) { return r.recountCodes(ctx, w) }}
	case audit.MisplacedJob:
		return action{fmt.Sprint("misplaced ", w.Job, w.Locations), "what was there is quarantined",
			func(ctx context.Context) (bool, error) { return r.quarantine(ctx, w) }}
	}
	panic(fmt.Sprintf("no repair of %T", wrong))
}

// quarantine repairs the locations, and returns whether something of this job was quarantined
// there, by this or an earlier repair (see repairLocation).
func (r *partitionRepair) quarantine(ctx context.Context, w audit.MisplacedJob) (some bool, err error) {
	for _, at := range w.Locations {
		removed, err := r.repairLocation(ctx, at)
		if err != nil {
			return some, fmt.Errorf("repair %s %s: %w", at.Name, at.Owner, err)
		}
		some = some || removed[w.Job]
	}
	return some, nil
}

// setOwner sets the owner key of a group to its tenant. It does nothing if the tenant that the key
// names has a group of the same id: then nothing says which of the two is right. It does nothing
// either if the key has changed.
func (r *partitionRepair) setOwner(ctx context.Context, w audit.WrongOwner) (bool, error) {
	key := r.space.OfGroup(w.Group).Owner(w.Group)
	if w.Owner == "" {
		return r.Cmd.SetNX(ctx, key, w.Tenant, 0).Result()
	}
	has, err := ledger.TenantOf(ctx, r.Cmd, r.space.OfTenant(w.Owner), w.Group)
	if err != nil {
		return false, err
	}
	if has == w.Owner {
		return false, nil // two tenants have a group of this id
	}
	err = r.Cmd.Watch(ctx, func(tx *redis.Tx) error {
		if now, err := tx.Get(ctx, key).Result(); err != nil || now != w.Owner {
			return redis.TxFailedErr
		}
		_, err := tx.TxPipelined(ctx, func(p redis.Pipeliner) error { return p.Set(ctx, key, w.Tenant, 0).Err() })
		return err
	}, key)
	return err == nil, ignoreConflict(err)
}

// ignoreConflict returns err, or nil if err says that a watched key has changed.
func ignoreConflict(err error) error {
	if errors.Is(err, redis.TxFailedErr) {
		return nil
	}
	return err
}

// recountCodes sets a group's error codes to those of its failures. It does nothing if a job fails
// or is retried in between.
func (r *partitionRepair) recountCodes(ctx context.Context, w audit.WrongCodes) (bool, error) {
	before, err := r.readCodes(ctx, w.Group)
	if err != nil {
		return false, err
	}
	differences := map[string]int64{}
	command := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.HScan(ctx, r.p.Failures(w.Group), cursor, "", read.PageSize)
	}
	seen := map[string]bool{} // a scan may yield the same field twice
	if err := r.Scan(ctx, command, func(page []string) error {
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
	after, err := r.readCodes(ctx, w.Group)
	if err != nil || fmt.Sprint(before) != fmt.Sprint(after) {
		return false, err
	}
	for code, n := range before.codes {
		if differences["code:"+code] -= read.Int(n); differences["code:"+code] == 0 {
			delete(differences, "code:"+code)
		}
	}
	return ledger.RepairGroup(ctx, r.Cmd, r.p, w.Group, w.Tenant, read.Int(before.repaired), differences)
}

// codesReading holds a group's error codes as of one instant, and what changes whenever they do.
type codesReading struct {
	repaired any // the version of the group's repairs
	codes    map[string]string
	failures int64
}

// readCodes reads the error codes of a group.
func (r *partitionRepair) readCodes(ctx context.Context, id string) (codesReading, error) {
	var hash *redis.SliceCmd
	var all *redis.MapStringStringCmd
	var n *redis.IntCmd
	err := r.Transaction(ctx, func(p redis.Pipeliner) {
		hash, all, n = p.HMGet(ctx, r.p.Group(id), "repaired"), p.HGetAll(ctx, r.p.Codes(id)),
			p.HLen(ctx, r.p.Failures(id))
	})
	if err != nil {
		return codesReading{}, err
	}
	return codesReading{hash.Val()[0], all.Val(), n.Val()}, nil
}

// whyNotRepaired says why a violation can't be repaired, and what the operator can do.
func whyNotRepaired(v audit.Violation) string {
	kind, _, _ := strings.Cut(v.Key, " ")
	switch {
	case v.Law == audit.LawLocation && kind == "key":
		return "another program has written it: delete or rename it, and audit again to find what was lost"
	case v.Law == audit.LawConservation || v.Law == audit.LawStates || v.Law == audit.LawLifecycle && kind == "status":
		return "its states are wrong and the right ones are not known: cancel the group and submit its jobs again"
	case v.Law == audit.LawLifecycle && kind == "threshold":
		return "its end was announced and can't be taken back; the command retry runs its failed jobs again"
	case v.Law == audit.LawLifecycle:
		return "the right times are not known; this does no harm"
	case v.Law == audit.LawResults && v.Ordinal == nil:
		return "merged results can't be taken apart; its results and failures are exact, its aggregate is not"
	case v.Law == audit.LawResults:
		return "it is not known what the result was, or whether it was reduced"
	case v.Law == audit.LawRegistry && kind == "partition":
		return "its tenant belongs to another partition: cancel it and submit its jobs again"
	case v.Law == audit.LawRegistry:
		return "two groups have this id, or its hash has a wrong id: expire one of them"
	}
	return "the roles correct it soon, or it changes too fast to be repaired: audit again"
}
