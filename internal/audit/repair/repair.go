// Package repair sets wrong data in Redis right where the right value is certain: it acts on what
// package audit finds and proves. [Run] repairs jobs, groups and counters, [OwnerKeys] deletes
// owner keys without a group, and [Lose] ends missing jobs as failed. It hides in which order and with which scripts this is done.
//
// Each repair of Run is one atomic step in Redis that compares states and versions with what the
// audit saw: it changes nothing if the data has moved since, and a repeated repair changes nothing
// either.
package repair

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Result says what was done about a violation, or why nothing was done.
type Result struct {
	Law       string `json:"law"`
	Partition int    `json:"partition"`
	Group     string `json:"group"`
	Ordinal   *int64 `json:"ordinal,omitempty"`
	Detail    string `json:"detail"`
	Done      bool   `json:"done"`
}

// newResult returns the result for a violation. more is appended to the violation's detail.
func newResult(v audit.Violation, more string, done bool) Result {
	return Result{v.Law, v.Partition, v.Group, v.Ordinal, v.Detail + more, done}
}

// maxRuns is the most rounds of audit and repair in one call of Run: a repair may reveal another
// violation.
const maxRuns = 8

// Run audits all partitions and repairs what it can: it sets counts and counters to the recounted
// values, quarantines what does not belong at its location, and ends missing jobs as failed with
// code LOST. It repeats this until no repair succeeds, at most maxRuns times, and returns the
// report of what is left. It calls tell for the repairs of a partition when that is done, and at
// the end for each violation that it can't repair. The roles may be at work. If they change the
// data too fast, some violations are left for the next call.
func Run(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, opts audit.Options, tell func(Result),
) (audit.Report, error) {
	for pass := 1; ; pass++ {
		report, err := audit.Run(ctx, conn, space, opts)
		if err != nil {
			return report, err
		}
		repaired := 0
		var unrepaired []Result
		for _, found := range report.Partitions {
			r := partitionRepair{
				Reader: read.Reader{Cmd: conn.Cmd, Pacer: read.NewPacer(opts.Rate)}, conn: conn, space: space,
				p: found.Partition, found: found, removed: map[read.Location]map[read.Job]bool{},
			}
			results, err := r.run(ctx)
			for _, r := range results {
				if !r.Done {
					unrepaired = append(unrepaired, r)
					continue
				}
				tell(r)
				repaired++
			}
			if err != nil {
				return report, fmt.Errorf("repair partition %d: %w", found.Partition.Index(), err)
			}
		}
		if repaired > 0 && pass < maxRuns {
			continue
		}
		for _, r := range unrepaired {
			tell(r)
		}
		if repaired > 0 {
			return audit.Run(ctx, conn, space, opts)
		}
		return report, nil
	}
}

type partitionRepair struct {
	read.Reader
	conn    *redisx.Conn
	space   keyspace.Space
	p       keyspace.Partition
	found   audit.PartitionReport
	removed map[read.Location]map[read.Job]bool // the repaired locations, and the jobs removed there
}

// run ends the missing jobs as failed and then repairs the findings. It returns a result for each
// ended job and for each finding, except findings about missing jobs without a repair of their own.
func (r *partitionRepair) run(ctx context.Context) (all []Result, err error) {
	missing := map[read.Job]bool{}
	for _, m := range r.found.Missing {
		ended, err := Lose(ctx, r.conn, r.p, m)
		if err != nil && !read.IsWrongType(err) { // a key of the wrong type has a finding of its own
			return all, err
		}
		for _, j := range m.Jobs {
			missing[read.Job{Group: m.Group, Ordinal: j.Ordinal}] = true
			if _, done := slices.BinarySearch(ended, j.Ordinal); !done { // ended is sorted
				continue
			}
			law := audit.LawLocation
			if j.State.Letter() == ledger.Done {
				law = audit.LawResults
			}
			all = append(all, Result{
				Law: law, Partition: r.p.Index(), Group: m.Group, Ordinal: &j.Ordinal, Done: true,
				Detail: fmt.Sprintf("it was %s and at no location: it has failed, with code LOST",
					audit.DescribeState(j.State)),
			})
		}
	}
	repaired := map[string]bool{} // whether a repair succeeded; several findings may have the same one
	for _, f := range r.found.Findings {
		repair, ok := repairs[f.Repair.Kind]
		if !ok {
			if !missing[f.Job()] {
				all = append(all, newResult(f.Violation, "; "+whyNotRepaired(f.Violation), false))
			}
			continue
		}
		key := fmt.Sprint(f.Group, f.Job(), f.Locations, f.Repair)
		if f.Repair.Kind != audit.Quarantine {
			key = fmt.Sprint(f.Group, " ", f.Tenant, f.Repair)
		}
		done, known := repaired[key]
		if !known {
			if done, err = repair.run(r, ctx, f); err != nil && !read.IsWrongType(err) {
				return all, err
			}
			repaired[key] = done
		}
		more := "; " + whyNotRepaired(audit.Violation{})
		if done {
			more = "; now " + repair.result(f)
		}
		all = append(all, newResult(f.Violation, more, done))
	}
	return all, nil
}

// Lose ends missing jobs as failed with code LOST, so that their group can end, and returns the
// ordinals of the jobs that it ended. It skips a job whose state has changed. If a worker still
// runs a job whose stream entry is gone, the worker's report will be refused as stale.
func Lose(ctx context.Context, conn *redisx.Conn, p keyspace.Partition, m audit.Missing) ([]int64, error) {
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

// creationTime is a wait that is longer than any process takes from reading a group's owner key to
// creating the group.
const creationTime = time.Second

// OwnerKeys looks in all of Redis for owner keys whose groups do not exist, deletes them, and waits
// for creationTime. If the group of a deleted key was created meanwhile, it writes the key again.
// It calls tell for each key that stays deleted.
func OwnerKeys(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(Result)) error {
	orphans, err := audit.FindOwnerKeysWithoutGroup(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for owner keys without a group: %w", err)
	}
	key := func(f audit.Finding) string { return space.OfGroup(f.Group).Owner(f.Group) }
	for _, f := range orphans {
		if err := conn.Cmd.Del(ctx, key(f)).Err(); err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", f.Group, err)
		}
	}
	// A process that is creating the group may have read the owner key before its deletion. Then
	// the group soon exists, and its key must be written again.
	if len(orphans) > 0 && redisx.Sleep(ctx, creationTime) != nil {
		return ctx.Err()
	}
	for _, f := range orphans {
		tenant, err := ledger.TenantOf(ctx, conn.Cmd, space.OfTenant(f.Tenant), f.Group)
		if err == nil && tenant != "" {
			err = conn.Cmd.SetNX(ctx, key(f), f.Tenant, 0).Err()
		}
		if err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", f.Group, err)
		}
		if tenant == "" {
			tell(newResult(f.Violation, "; now the key is gone", true))
		}
	}
	return nil
}

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
	audit.RepairDeleted: {says("it is off the lists of groups"), (*partitionRepair).setGroup},
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
	audit.Redeliver: {
		func(f audit.Finding) string { return "callback " + f.Repair.Callback + " is pending and due" }, (*partitionRepair).redeliver,
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

// redeliver makes a callback pending, at its place, and due.
func (r *partitionRepair) redeliver(ctx context.Context, f audit.Finding) (bool, error) {
	done, _, _, err := ledger.RedeliverCallbacks(ctx, r.Cmd, r.p, f.Repair.Callback)
	return done > 0, err
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
	case v.Law == audit.LawCallbacks:
		return "its queue passes over it when it is due; what is dead is deleted when its retention is over"
	case v.Law == audit.LawDelivery:
		return "the role that reads the stream takes it back within two leases: start it"
	case v.Law == audit.LawConservation || v.Law == audit.LawStates || v.Law == audit.LawLifecycle && kind == "status":
		return "its states are wrong and the right ones are not known: cancel the group and submit its jobs again"
	case v.Law == audit.LawLifecycle && kind == "threshold":
		return "its end was announced and can't be taken back; the command retry runs its failed jobs again"
	case v.Law == audit.LawLifecycle:
		return "the right times are not known, and nothing depends on them: it stays until the group is deleted"
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
