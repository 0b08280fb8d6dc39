package ledger

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Types returns the job types that a partition has seen and that were not retired.
func Types(ctx context.Context, c redis.Cmdable, p keyspace.Partition) ([]string, error) {
	types, err := c.ZRange(ctx, p.Types(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list types of partition %d: %w", p.Index(), err)
	}
	return types, nil
}

// Loads returns, for each of the types, its waiting, non-ready, ready and in-flight jobs in one
// partition, its stale reports and lost leases, and its totals. Here a job is in flight as soon as
// a worker process has read its entry. Loads makes one round trip. A type whose ready stream has no
// consumer group yet has no jobs in flight.
func Loads(ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []string) ([]api.TypeStats, error) {
	type replies struct {
		load    *redis.SliceCmd
		length  *redis.IntCmd
		pending *redis.XPendingCmd
	}
	// Each reply has the error of the pipeline or its own.
	reads, _ := pipelined(ctx, c, types, func(pipe redis.Pipeliner, typ string) replies {
		return replies{
			load:    pipe.HMGet(ctx, p.Load(typ), loadFields...),
			length:  pipe.XLen(ctx, p.Ready(typ)),
			pending: pipe.XPending(ctx, p.Ready(typ), keyspace.GroupWorkers),
		}
	})
	out := make([]api.TypeStats, len(types))
	for i, read := range reads {
		pending, err := read.pending.Result()
		if err == nil || !call.IsUnavailable(err) {
			err = read.load.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("read load of type %s: %w", types[i], err)
		}
		s := api.TypeStats{Type: types[i]}
		if pending != nil {
			s.InFlight = pending.Count
		}
		s.Ready = max(0, read.length.Val()-s.InFlight)
		load := values(read.load.Val())
		s.Waiting, s.NonReady, s.StaleOutcomes, s.LeasesLost = load.num(0), load.num(1), load.num(2), load.num(3)
		s.Backlog = s.Waiting + s.NonReady + s.Ready
		s.Totals = load[min(4, len(load)):].totals()
		out[i] = s
	}
	return out, nil
}

// totals names the fields of load:TYPE that only grow. The hash watch has the same fields for
// retired types.
var totals = []string{
	loadAccepted, loadStarted, loadDone, loadFailed, loadRetried,
	loadThrottled,
}

// loadFields are the fields of load:TYPE that Loads reads.
var loadFields = append([]string{
	loadWaiting, loadNonReady, loadStale, loadLost,
}, totals...)

// totals converts the values of the fields in the variable totals, in that order.
func (v values) totals() api.JobTotals {
	return api.JobTotals{
		Accepted: v.num(0), Started: v.num(1), Done: v.num(2), Failed: v.num(3), Retried: v.num(4), Throttled: v.num(5),
	}
}

// maxPausePages is the number of pages, 1,000 pauses each, that one call of PausedTypes reads at
// most.
const maxPausePages = 10

// PausedTypes returns paused types in alphabetical order: all paused ones of the given types, and
// other paused types, such as types without jobs. The hash pauses holds tenants, too: if it has
// more than about 10,000 fields, some of the other types may be missing, so that the cost of a call
// is bounded.
func PausedTypes(ctx context.Context, c redis.Cmdable, p keyspace.Partition, known []string) ([]string, error) {
	failed := func(err error) error { return fmt.Errorf("read pauses of partition %d: %w", p.Index(), err) }
	var types []string
	if len(known) > 0 {
		fields := make([]string, len(known))
		for i, typ := range known {
			fields[i] = pauseOfType + typ
		}
		values, err := c.HMGet(ctx, p.Pauses(), fields...).Result()
		if err != nil {
			return nil, failed(err)
		}
		for i, v := range values {
			if v != nil {
				types = append(types, known[i])
			}
		}
	}
	cursor := uint64(0)
	for range maxPausePages {
		pairs, next, err := c.HScan(ctx, p.Pauses(), cursor, pauseOfType+"*", 1000).Result()
		if err != nil {
			return nil, failed(err)
		}
		for pair := range slices.Chunk(pairs, 2) {
			types = append(types, strings.TrimPrefix(pair[0], pauseOfType))
		}
		if cursor = next; cursor == 0 {
			break
		}
	}
	slices.Sort(types)
	return slices.Compact(types), nil // HSCAN may return a field more than once
}

// TypePaused reports whether a type is paused.
func TypePaused(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string) (bool, error) {
	return c.HExists(ctx, p.Pauses(), pauseOfType+typ).Result()
}

// HaveJobs returns for each type of a partition whether it has waiting, non-ready or ready jobs, or
// jobs in flight. It costs one round trip.
func HaveJobs(ctx context.Context, c redis.Cmdable, p keyspace.Partition, types []string) ([]bool, error) {
	type replies struct {
		load  *redis.SliceCmd
		ready *redis.IntCmd
	}
	reads, err := pipelined(ctx, c, types, func(pipe redis.Pipeliner, typ string) replies {
		return replies{
			load:  pipe.HMGet(ctx, p.Load(typ), loadWaiting, loadNonReady),
			ready: pipe.XLen(ctx, p.Ready(typ)),
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read the jobs of types: %w", err)
	}
	have := make([]bool, len(types))
	for i, read := range reads {
		load := values(read.load.Val())
		have[i] = load.num(0) != 0 || load.num(1) != 0 || read.ready.Val() != 0
	}
	return have, nil
}

// PartitionStats are numbers of one partition as a whole.
type PartitionStats struct {
	Types         []string // the job types that the partition has seen and that were not retired
	Groups        int64    // all groups, ended ones too
	ActiveTenants int64
	DeadLetters   int64
	Retired       api.JobTotals // what retired types had counted
}

// ReadPartition reads the figures of a partition that PartitionStats has, in one round trip.
func ReadPartition(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (PartitionStats, error) {
	var types *redis.StringSliceCmd
	var groups, active, dead *redis.IntCmd
	var retired *redis.SliceCmd
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		types = pipe.ZRange(ctx, p.Types(), 0, -1)
		retired = pipe.HMGet(ctx, p.Watch(), totals...)
		groups, active, dead = pipe.ZCard(ctx, p.Groups()), pipe.SCard(ctx, p.Active()), pipe.XLen(ctx, p.DeadLetters())
		return nil
	})
	if err != nil {
		return PartitionStats{}, fmt.Errorf("read stats of partition %d: %w", p.Index(), err)
	}
	return PartitionStats{
		Types: types.Val(), Groups: groups.Val(), ActiveTenants: active.Val(), DeadLetters: dead.Val(),
		Retired: values(retired.Val()).totals(),
	}, nil
}

var why = script("jobs/why", "priority")

// NextJob in the place of an ordinal asks for a group's next job: the next waiting one in Why,
// the next due one in FindNonReady, and the first ready one in FindReady.
const NextJob = -1

// WaitingJob is what the script why returns of a job that may be waiting, of its group and of the
// jobs before it.
type WaitingJob struct {
	Now          time.Time // Redis's clock
	State        Letter    // 0 when NextJob was asked for and no job of the group is in the fair queue
	Ordinal      int64     // NextJob when State is 0
	Tenant, Type string    // Type is "" when the group has several types and only the job's blob names its own
	Status       api.Status
	Types        []string // the types of the group's jobs, as many as Why looks at

	GroupPaused, TenantPaused, TypePaused bool

	HeldUntil        time.Time // the group's run_at while it is scheduled; zero: it is not
	RateLimitedUntil time.Time // when the tenant of a waiting job returns to the fair queue; zero: not rate-limited
	Place            int64     // jobs of its group before it in the same queue; -1: unknown
	ByPriority       bool      // a lane's groups are ordered by priority; otherwise each tenant's by age and size
	GroupsBefore     int64     // groups before its group in that order, for its type
	JobsBefore       int64     // waiting jobs of these groups
	Started          time.Time // when the first job of the group's round started; zero: none has

	// The next fields are counts of the group. Ended jobs are done, failed or cancelled.
	Accepted, NonReady, Ready, InFlight, Ended int64

	Key string // of a waiting job whose Place is known; "": it has none
}

// Why reads a job, or with NextJob the one with the lowest ordinal at the heads of the group's
// queues. It looks at no more than `most` types of the group and `most` groups before it: beyond
// that, JobsBefore is too low. Errors: api.ErrNotFound.
func Why(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64, most int,
) (WaitingJob, error) {
	r := run(ctx, c, why, p, group, ordinal, most)
	_ = r.Code("OK")
	w := WaitingJob{
		Now: r.Time(), State: letterOf(r.Text()), Ordinal: r.Number(), Tenant: r.Text(), Status: api.Status(r.Text()),
		Type: r.Text(),
	}
	paused := r.Text()
	w.GroupPaused, w.TenantPaused = strings.Contains(paused, "g"), strings.Contains(paused, "t")
	w.TypePaused = strings.Contains(paused, "y")
	w.HeldUntil, w.RateLimitedUntil = r.Time(), r.Time()
	w.Place, w.GroupsBefore, w.JobsBefore, w.ByPriority = r.Number(), r.Number(), r.Number(), r.Flag()
	w.Started, w.Ended = r.Time(), r.Number()
	w.Accepted, w.NonReady, w.Ready, w.InFlight = r.Number(), r.Number(), r.Number(), r.Number()
	w.Types, w.Key = r.List().Texts(), r.Text()
	return call.Done(r, w)
}
