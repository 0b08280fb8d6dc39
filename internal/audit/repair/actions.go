package repair

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// repairs is the table of the repairs by kind. result says in words what is true after the repair;
// run does it. run returns false if it changed nothing, because the data was not as the audit saw
// it any more: it compares and changes the data in one atomic step; Quarantine needs one for each
// element.
var repairs = map[audit.RepairKind]struct {
	result func(audit.Finding) string
	run    func(*partitionRepair, context.Context, audit.Finding) (bool, error)
}{
	audit.RepairGroup: {
		says("its counts agree with its states, and it is on its lists"), (*partitionRepair).setGroup,
	},
	audit.RepairDeleted: {says("it is off the list of groups"), (*partitionRepair).setGroup},
	audit.RepairCodes:   {says("its error codes count its failures"), (*partitionRepair).recountCodes},
	audit.Quarantine:    {says("what was there is quarantined"), (*partitionRepair).quarantine},
	audit.RepairOwner: {
		func(f audit.Finding) string { return "its owner key says " + f.Tenant }, (*partitionRepair).setOwner,
	},
	audit.RepairCounter: {
		func(f audit.Finding) string {
			return fmt.Sprintf("%s of %s is %d", f.Repair.Counter.Name, f.Repair.Counter.Of, f.Repair.Counter.Want)
		},
		(*partitionRepair).setCounter,
	},
}

// says returns a result that is the same for all findings.
func says(result string) func(audit.Finding) string {
	return func(audit.Finding) string { return result }
}

// setGroup adds the differences to the counts of a group, and makes the lists of groups name it
// rightly.
func (r *partitionRepair) setGroup(ctx context.Context, f audit.Finding) (bool, error) {
	return ledger.RepairGroup(ctx, r.Cmd, r.p, f.Group, f.Tenant, f.Repair.Version, f.Repair.Differences)
}

// setCounter sets a counter of a tenant or type to the recounted value.
func (r *partitionRepair) setCounter(ctx context.Context, f audit.Finding) (bool, error) {
	return ledger.RepairCounter(ctx, r.Cmd, r.p, f.Repair.Counter)
}

// quarantine repairs the finding's locations. It returns whether any of them held something of the
// finding's job that is quarantined now, by this or an earlier repair (see repairLocation).
func (r *partitionRepair) quarantine(ctx context.Context, f audit.Finding) (some bool, err error) {
	for _, at := range f.Locations {
		removed, err := r.repairLocation(ctx, at)
		if err != nil {
			return some, fmt.Errorf("repair %s %s: %w", at.Name, at.Owner, err)
		}
		some = some || removed[f.Job()]
	}
	return some, nil
}

// setOwner sets the owner key of a group to its tenant. It changes nothing if the key has changed
// since the audit, or if the tenant in the key has a group with the same id: then it is not known
// which of the two tenants is right.
func (r *partitionRepair) setOwner(ctx context.Context, f audit.Finding) (bool, error) {
	key, owner := r.space.OfGroup(f.Group).Owner(f.Group), f.Repair.Owner
	if owner == "" {
		return r.Cmd.SetNX(ctx, key, f.Tenant, 0).Result()
	}
	has, err := ledger.TenantOf(ctx, r.Cmd, r.space.OfTenant(owner), f.Group)
	if err != nil {
		return false, err
	}
	if has == owner {
		return false, nil // two tenants have a group of this id
	}
	err = r.Cmd.Watch(ctx, func(tx *redis.Tx) error {
		if now, err := tx.Get(ctx, key).Result(); err != nil || now != owner {
			return redis.TxFailedErr
		}
		_, err := tx.TxPipelined(ctx, func(p redis.Pipeliner) error { return p.Set(ctx, key, f.Tenant, 0).Err() })
		return err
	}, key)
	if errors.Is(err, redis.TxFailedErr) {
		return false, nil // the key has changed
	}
	return err == nil, err
}

// recountCodes sets a group's error codes to the codes in its failures. It changes nothing if a job
// fails or is retried while it counts.
func (r *partitionRepair) recountCodes(ctx context.Context, f audit.Finding) (bool, error) {
	before, err := r.readCodes(ctx, f.Group)
	if err != nil {
		return false, err
	}
	differences := map[string]int64{}
	seen := map[string]bool{} // a scan may yield the same field twice
	err = r.ScanHash(ctx, r.p.Failures(f.Group), func(field, record string) error {
		if code := read.ErrorCode(record); code != "" && !seen[field] {
			differences["code:"+code]++
		}
		seen[field] = true
		return nil
	})
	if err != nil {
		return false, err
	}
	after, err := r.readCodes(ctx, f.Group)
	if err != nil || !reflect.DeepEqual(before, after) {
		return false, err
	}
	for code, n := range before.codes {
		differences["code:"+code] -= read.Int(n)
	}
	maps.DeleteFunc(differences, func(_ string, n int64) bool { return n == 0 })
	return ledger.RepairGroup(ctx, r.Cmd, r.p, f.Group, f.Tenant, before.version, differences)
}

// codesReading holds a group's error codes as of one instant, and the numbers that change whenever
// the codes do.
type codesReading struct {
	version  int64 // of the group's repairs
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
	return codesReading{read.Int(hash.Val()[0]), all.Val(), n.Val()}, nil
}

// whyNotRepaired says why a violation can't be repaired, and what the operator can do.
func whyNotRepaired(v audit.Violation) string {
	kind, _, _ := strings.Cut(v.Key, " ")
	switch {
	case v.Law == audit.LawLocation && kind == "key":
		return "another program has written it: delete or rename it, and audit again to find what was lost"
	case v.Law == audit.LawDelivery:
		return "the role that reads the stream takes it back within two leases: start it"
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

// repairLocation reads a location once and quarantines the elements that do not belong there. It
// returns the jobs of which it removed an element. If the location was repaired before, it only
// returns the same jobs again.
func (r *partitionRepair) repairLocation(ctx context.Context, at read.Location) (map[read.Job]bool, error) {
	if known := r.removed[at]; known != nil {
		return known, nil
	}
	l := locationRepair{
		partitionRepair: r,
		at:              at,
		candidates:      r.found.Misplaced[at],
		kept:            map[read.Job]string{},
		removed:         map[read.Job]bool{},
	}
	err := l.run(ctx)
	r.removed[at] = l.removed
	return l.removed, err
}

// locationRepair is the repair of one location.
type locationRepair struct {
	*partitionRepair
	at         read.Location
	candidates map[read.Job]bool   // the jobs that may be misplaced or duplicated here
	kept       map[read.Job]string // the first element of each candidate that stays here
	removed    map[read.Job]bool   // the candidates of which something was quarantined
}

// run reads the location and then quarantines those elements of the candidate jobs that do not
// belong there.
func (l *locationRepair) run(ctx context.Context) error {
	if l.at.Name == read.Failures && l.at.Type != "" { // the record of one job
		ordinal, _ := strconv.ParseInt(l.at.Type, 10, 64) // it was formatted from a number
		return l.try(ctx, read.Element{ID: l.at.Type, Job: read.Job{Group: l.at.Owner, Ordinal: ordinal}})
	}
	length := int64(0)
	if l.at.Name == read.Queue {
		var err error
		if length, err = l.Cmd.LLen(ctx, l.at.Key(l.p)).Result(); err != nil {
			return err
		}
	}
	var elements []read.Element
	err := l.Elements(ctx, l.p, l.at, length, func(e read.Element) error {
		if l.candidates[e.Job] {
			elements = append(elements, e)
		}
		return nil
	})
	for _, e := range elements {
		if err == nil {
			err = l.try(ctx, e)
		}
	}
	return err
}

// try quarantines an element of a candidate job if a script confirms in Redis that it does not
// belong at this location. The script is also given the element of the same job that stays, so that
// it can recognize a duplicate.
func (l *locationRepair) try(ctx context.Context, e read.Element) error {
	item := ledger.Misplaced{Location: l.at.Name, Owner: l.at.Owner, Item: e.ID}
	if l.at.Name == read.Queue {
		item.Type = l.at.Type
	}
	if e.Job != (read.Job{}) && l.kept[e.Job] != e.ID {
		item.Twin = l.kept[e.Job]
	}
	gone, err := ledger.RepairMisplaced(ctx, l.Cmd, l.p, item)
	switch {
	case err != nil:
		return err
	case gone:
		l.removed[e.Job] = true
	case l.kept[e.Job] == "":
		l.kept[e.Job] = e.ID
	}
	return nil
}
