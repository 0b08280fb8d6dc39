package checkers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

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
	var mu sync.Mutex
	pattern := read.AnyPartition(space.Partition(0).Room("*"))
	err := conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		for cursor := uint64(0); ; {
			keys, next, err := shard.Scan(ctx, cursor, pattern, read.PageSize).Result()
			if err != nil {
				return err
			}
			mu.Lock()
			for _, key := range keys {
				_, event, _ := strings.Cut(key, "}:room:")
				event, _, _ = strings.Cut(event, ":")
				if p := space.OfEvent(event); event != "" && strings.HasPrefix(key, p.Room(event)) {
					all[p.Index()][event] = true
				}
			}
			mu.Unlock()
			if cursor = next; cursor == 0 {
				return nil
			}
		}
	})
	return all, err
}
