// Package checkers has the audit of what is in Redis beside the jobs: guards, and events of the
// waiting room. The roles and the command line put it together with package audit.
//
// Its laws:
//
//   - guard-state: each member of a guard is in exactly one of the states free, cooling, busy and
//     off.
//   - guard-held: a member counts as many leases as it has, and as many probes of its breaker's
//     present generation. Each lease has an end.
//   - guard-queue: the queue of a guard and its waiters are the same calls.
//   - room-state: each user of an event of the waiting room is in the sets of the user's state, and
//     in no other: waiting, away or slots. A waiting user who polls is in waiting and away. The
//     event has its settings, and its time in the list of events is at most 15 s after something is
//     due.
//   - room-number: numbers are unique in an event, and at most the last one that was given. A user
//     waits in the place of the user's number.
//   - room-slots: each promoted user and each user with a token holds a slot until that ends, under
//     a fence of its own. The seats that are left and those that were sold are the declared ones.
//
// An event is read in pages, each of which is as of one instant, so findings about it are certain
// at once.
package checkers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/audit/repair"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// Laws lists the names of the laws.
var Laws = []string{
	guard.LawState, guard.LawHeld, guard.LawQueue, waitingroom.LawState, waitingroom.LawNumber, waitingroom.LawSlots,
}

// CheckGuards adds to the report a violation for each law that a guard breaks. It scans the names
// of all keys in Redis to find the guards.
func CheckGuards(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *audit.Report) error {
	var all []api.Violation
	err := eachGuard(ctx, conn, space, func(c *guard.Client, name string) error {
		found, err := c.Audit(ctx, name)
		for _, f := range found {
			all = append(all, guardViolation(f))
		}
		return err
	})
	report.Add(all...)
	return err
}

// RepairGuards repairs the members and counters of all guards, and calls tell for each repair.
// Guards may be in use meanwhile.
func RepairGuards(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(repair.Result)) error {
	return eachGuard(ctx, conn, space, func(c *guard.Client, name string) error {
		repaired, err := c.Repair(ctx, name)
		for _, f := range repaired {
			v := guardViolation(f)
			tell(repair.Result{Law: v.Law, Partition: v.Partition, Detail: v.Detail + "; now it is right", Done: true})
		}
		return err
	})
}

// eachGuard calls do for each guard of the key space, also those of the kind key, until do returns
// an error.
func eachGuard(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, do func(c *guard.Client, name string) error,
) error {
	c := guard.New(conn.Cmd, guard.Prefix(space.Prefix()))
	names, err := c.Guards(ctx, true)
	for _, name := range names {
		if err == nil {
			err = do(c, name)
		}
	}
	if err != nil {
		return fmt.Errorf("audit guards: %w", err)
	}
	return nil
}

func guardViolation(f guard.Finding) api.Violation {
	return api.Violation{Law: f.Law, Partition: audit.NoPartition, Detail: "guard " + f.Guard + ": " + f.Detail}
}

// CheckRooms adds to the report a violation for each law that an event of the waiting room breaks.
// It scans the names of all keys in Redis, to find events that are missing in the list of events.
func CheckRooms(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *audit.Report) error {
	lost, err := eventsByKey(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for events: %w", err)
	}
	for _, p := range space.All() {
		if err := checkRooms(ctx, conn, space, p, lost[p.Index()], audit.Options{}, report); err != nil {
			return err
		}
	}
	return nil
}

// CheckRoomsOf audits, as CheckRooms does, only the events that the list of one partition names. Of
// opts it uses Rate.
func CheckRoomsOf(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, p keyspace.Partition, opts audit.Options, report *audit.Report,
) error {
	return checkRooms(ctx, conn, space, p, map[string]bool{}, opts, report)
}

// checkRooms audits the events of a partition: those in the partition's list of events, and those
// in names, to which it adds the listed ones. An event with a key of the wrong Redis type gets a
// violation for that and is not audited further.
func checkRooms(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, p keyspace.Partition, names map[string]bool,
	opts audit.Options, report *audit.Report,
) error {
	var all []api.Violation
	defer func() { report.Add(all...) }()
	add := func(v api.Violation) {
		v.Partition = p.Index()
		all = append(all, v)
	}
	rooms := waitingroom.New(conn, space, nil)
	pacer := read.NewPacer(opts.Rate)
	listed, err := rooms.InPartition(ctx, p)
	switch {
	case read.IsWrongType(err):
		add(api.Violation{
			Law: waitingroom.LawState, Key: p.Rooms(), Detail: "the list of events is of another type than it must be",
		})
	case err != nil:
		return fmt.Errorf("audit events of partition %d: %w", p.Index(), err)
	}
	for _, event := range listed {
		names[event] = true
	}
	for _, event := range slices.Sorted(maps.Keys(names)) {
		found, err := rooms.Audit(ctx, event, pacer.Wait)
		if read.IsWrongType(err) {
			add(api.Violation{
				Law: waitingroom.LawState, Key: event + " type",
				Detail: "event " + event + ": a key that its scripts use is of another type than it must be",
			})
			continue
		}
		if err != nil {
			return fmt.Errorf("audit partition %d: %w", p.Index(), err)
		}
		for _, f := range found {
			add(api.Violation{
				Law: f.Law, Detail: "event " + event + ": " + f.Detail, Key: event + " " + f.Key, Count: f.Count,
			})
		}
	}
	return nil
}

// eventsByKey scans all keys and returns, by partition, the names of the events that have a key.
func eventsByKey(ctx context.Context, conn *redisx.Conn, space keyspace.Space) (map[int]map[string]bool, error) {
	all := map[int]map[string]bool{}
	for _, p := range space.All() {
		all[p.Index()] = map[string]bool{}
	}
	err := read.ScanKeys(ctx, conn, read.AnyPartition(space.Partition(0).Room("*")), func(keys []string) error {
		for _, key := range keys {
			_, event, _ := strings.Cut(key, "}:room:")
			event, _, _ = strings.Cut(event, ":")
			if p := space.OfEvent(event); event != "" && strings.HasPrefix(key, p.Room(event)) {
				all[p.Index()][event] = true
			}
		}
		return nil
	})
	return all, err
}
