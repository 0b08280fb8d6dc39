package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

var (
	lead         = script("processes/lead")
	retire       = script("processes/retire")
	dropConsumer = call.NewScript("drop_consumer", lua.Source("processes/drop_consumer"))
)

// Lead makes a watcher the leader of a partition until the lease ends, or extends its lease. A
// lease of 0 ends the leadership. It returns the fencing number, which grows with each change of
// leader, and when the same leader comes back after its lease has ended; 0 if another watcher is
// the leader, or if the lease is 0. Twice: the leader keeps its number.
func Lead(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, watcher string, lease time.Duration,
) (fence int64, err error) {
	return acquireLease(ctx, c, p, watcher, lease, "watch", 0)
}

// LeadRebalancing does the same as Lead for the quota rebalancer, the process that rebalances the
// quotas of all partitions. Call it on partition 0. The fencing number is higher than above: the
// highest one that a partition is known to have seen.
func LeadRebalancing(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, lease time.Duration, above int64,
) (fence int64, err error) {
	return acquireLease(ctx, c, p, process, lease, "rebalance", above)
}

func acquireLease(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, length time.Duration, scope string,
	above int64,
) (int64, error) {
	r := run(ctx, c, lead, p, process, length.Milliseconds(), scope, above)
	fence, _ := r.Number(), r.Duration()
	return call.Done(r, fence)
}

// CountRenewal adds one to the counter of the leader lease's renewals and returns it. The counter
// survives a change of leader. If its value is not higher than the one returned before, Redis has
// lost writes that it had confirmed.
func CountRenewal(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (int64, error) {
	n, err := c.HIncrBy(ctx, p.Watch(), watchRenewals, 1).Result()
	if err != nil {
		return 0, fmt.Errorf("count renewals of the leader lease: %w", err)
	}
	return n, nil
}

// TakeDeletedFound returns whether, since the last call, [Reclaim] has found pending entries that
// are no longer in their ready stream. It deletes the mark that says so.
func TakeDeletedFound(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (bool, error) {
	removed, err := c.HDel(ctx, p.Watch(), watchSuspicious).Result()
	if err != nil {
		return false, fmt.Errorf("read whether reclaim has found deleted entries: %w", err)
	}
	return removed > 0, nil
}

// Retire deletes a type that has no jobs and was not served after latest. It reports whether it
// has. A new job of the type creates it again. Twice: the second call reports false.
func Retire(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string, latest time.Time) (bool, error) {
	r := run(ctx, c, retire, p, typ, latest.UnixMilli())
	return call.Done(r, r.Flag())
}

// DropConsumer deletes a stream's consumer, if it holds no entries and was idle for at least the
// given time. It reports whether it has deleted it. Twice: the second call reports false.
func DropConsumer(
	ctx context.Context, c redis.Cmdable, stream, group, consumer string, idle time.Duration,
) (bool, error) {
	r := dropConsumer.Read(ctx, c, []string{stream}, []any{group, consumer, idle.Milliseconds()})
	return call.Done(r, r.Flag())
}

// AuditState is what the leader of a partition knows of its audits.
type AuditState struct {
	LookedAt *time.Time       `json:"looked_at"` // time of the last incremental check; nil: none
	DeepAt   *time.Time       `json:"deep_at"`   // time of the last full audit; nil: none
	ByLaw    map[string]int64 `json:"by_law"`    // number of open violations
	// Violations are the open violations; the caller of StoreAudit bounds their number.
	Violations []AuditedViolation `json:"violations"`
}

// AuditedViolation is an open violation, with what the next leader needs to continue tracking it.
type AuditedViolation struct {
	api.Violation
	Key  string `json:"key,omitempty"` // Violation.Key
	Deep bool   `json:"deep"`          // a full audit has found it
}

// StoreAudit replaces the stored audit state of a partition. A process that has lost its leadership
// without knowing may store an older state; the next check of the leader replaces it.
func StoreAudit(ctx context.Context, c redis.Cmdable, p keyspace.Partition, s AuditState) error {
	document, err := json.Marshal(s)
	if err == nil {
		err = c.Set(ctx, p.Audit(), document, 0).Err()
	}
	if err != nil {
		return fmt.Errorf("store the state of the audit of partition %d: %w", p.Index(), err)
	}
	return nil
}

// ReadAudit returns the audit state that StoreAudit stored last; the zero AuditState if there is
// none.
func ReadAudit(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (s AuditState, err error) {
	document, err := c.Get(ctx, p.Audit()).Bytes()
	if errors.Is(err, redis.Nil) {
		return s, nil
	}
	if err == nil {
		err = json.Unmarshal(document, &s)
	}
	if err != nil {
		return s, fmt.Errorf("read the state of the audit of partition %d: %w", p.Index(), err)
	}
	for i := range s.Violations {
		s.Violations[i].Violation.Key = s.Violations[i].Key
	}
	return s, nil
}

// Leader returns the id of the watcher process whose lease on a partition's leadership is valid by
// Redis's clock; "" if there is none.
func Leader(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (string, error) {
	now, err := c.Time(ctx).Result()
	if err != nil {
		return "", fmt.Errorf("read the time of Redis: %w", err)
	}
	lease, err := c.HMGet(ctx, p.Watch(), watchOwner, watchUntil).Result()
	if err != nil {
		return "", fmt.Errorf("read the leader of partition %d: %w", p.Index(), err)
	}
	if !values(lease).when(1).After(now) {
		return "", nil
	}
	return values(lease).str(0), nil
}

// ActiveTenants returns one page of a partition's active tenants, about n, from an SSCAN cursor.
// Begin with cursor 0; a next cursor of 0 is the end. Pages may repeat a tenant. unfinished has the
// number of jobs of each tenant that have not ended. It makes two round trips, and one cheap read a
// tenant.
func ActiveTenants(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, cursor uint64, n int64,
) (tenants []string, unfinished []int64, next uint64, err error) {
	tenants, next, err = c.SScan(ctx, p.Active(), cursor, "", n).Result()
	if err != nil {
		return nil, nil, 0, fmt.Errorf("list active tenants of partition %d: %w", p.Index(), err)
	}
	reads, err := pipelined(ctx, c, tenants, func(pipe redis.Pipeliner, tenant string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Tenant(tenant), tenantUnfinished)
	})
	if err != nil {
		return nil, nil, 0, fmt.Errorf("read active tenants of partition %d: %w", p.Index(), err)
	}
	unfinished = make([]int64, len(tenants))
	for i, read := range reads {
		unfinished[i] = values(read.Val()).num(0)
	}
	return tenants, unfinished, next, nil
}

// MaxTopSamples is how many samples of the busiest tenants a partition keeps.
const MaxTopSamples = 180

// StoreBusiest stores the document with a partition's busiest tenants, which the watcher has found, and
// adds a sample of them to those of TopSamples. It stores nothing while the memory of Redis is full.
func StoreBusiest(ctx context.Context, c redis.Cmdable, p keyspace.Partition, document, sample []byte) error {
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		pipe.Set(ctx, p.Top(), document, 0)
		pipe.LPush(ctx, p.TopHistory(), sample)
		pipe.LTrim(ctx, p.TopHistory(), 0, MaxTopSamples-1)
		return nil
	})
	if err != nil && !call.IsOOM(err) {
		return fmt.Errorf("store the busiest tenants of partition %d: %w", p.Index(), err)
	}
	return nil
}

// Busiest returns the document that StoreBusiest stored last; nil if there is none.
func Busiest(ctx context.Context, c redis.Cmdable, p keyspace.Partition) ([]byte, error) {
	document, err := c.Get(ctx, p.Top()).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the busiest tenants of partition %d: %w", p.Index(), err)
	}
	return document, nil
}

// TopSamples returns the samples that StoreBusiest has stored, the newest first.
func TopSamples(ctx context.Context, c redis.Cmdable, p keyspace.Partition) ([]string, error) {
	samples, err := c.LRange(ctx, p.TopHistory(), 0, MaxTopSamples-1).Result()
	if err != nil {
		return nil, fmt.Errorf("read the samples of the busiest tenants of partition %d: %w", p.Index(), err)
	}
	return samples, nil
}

// OldestWaiting returns since when the jobs that are the next of these tenants wait: the earliest
// time at which one of them was accepted, or due to start. nil: none of their jobs waits, or only
// those of paused groups and types. It looks at 1,000 queues at most.
func OldestWaiting(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenants []string,
) (oldest *time.Time, err error) {
	types, err := c.ZRange(ctx, p.Types(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("read the types of partition %d: %w", p.Index(), err)
	}
	waiting, err := pipelined(ctx, c, types, func(pipe redis.Pipeliner, typ string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Load(typ), loadWaiting)
	})
	if err != nil {
		return nil, fmt.Errorf("read the waiting jobs of partition %d: %w", p.Index(), err)
	}
	var queues []TenantQueue
	for _, tenant := range tenants {
		for i, typ := range types {
			if integer(values(waiting[i].Val()).str(0)) <= 0 {
				continue
			}
			queues = append(queues, TenantQueue{typ, "high", tenant}, TenantQueue{typ, "normal", tenant}, TenantQueue{typ, "low", tenant})
		}
	}
	found, err := ReadQueues(ctx, c, p, queues[:min(len(queues), 1000)], 1)
	if err != nil {
		return nil, err
	}
	type next struct {
		jobs  *redis.StringSliceCmd
		runAt *redis.SliceCmd
	}
	type firstGroup struct{ id, typ string }
	var first []firstGroup
	for q, groups := range found {
		if len(groups.Groups) > 0 && !groups.TypePaused {
			first = append(first, firstGroup{groups.Groups[0].ID, q.Type})
		}
	}
	reads, err := pipelined(ctx, c, first, func(pipe redis.Pipeliner, g firstGroup) next {
		return next{pipe.LRange(ctx, p.Queue(g.id, g.typ), 0, 0), pipe.HMGet(ctx, p.Group(g.id), groupRunAt)}
	})
	if err != nil {
		return nil, fmt.Errorf("read the next jobs of partition %d: %w", p.Index(), err)
	}
	for _, read := range reads {
		for _, blob := range read.jobs.Val() {
			var j Job
			c := cutter{rest: blob}
			if c.queued(&j); c.bad {
				continue
			}
			since := j.Accepted
			if due := instant(values(read.runAt.Val()).str(0)); due.After(since) {
				since = due
			}
			if oldest == nil || since.Before(*oldest) {
				oldest = new(since.UTC())
			}
		}
	}
	return oldest, nil
}

const (
	// SampleSlot is the length of a slot of time. Of each slot one sample is kept.
	SampleSlot = 10 * time.Second
	// MaxSamples is how many samples are kept: those of a day.
	MaxSamples = int(24 * time.Hour / SampleSlot)
)

var history = call.NewScript("history", lua.Source("processes/history"))

// Sample is the figures of the installation at one time. It has totals and no rates: a rate is
// computed from two samples, whatever time lies between them.
type Sample struct {
	At time.Time `json:"-"` // by Redis
	api.JobTotals
	api.Gauges
	// Of the jobs that started since the sample before; nil: none, or not known.
	StartDelayP50MS *float64 `json:"p50,omitempty"`
	StartDelayP99MS *float64 `json:"p99,omitempty"`
}

// RecordSample stores a sample, unless a sample of the same slot or a later one is stored. It first
// deletes samples of the future, which a clock that was set back has left. It reports whether it
// has stored the sample. Twice: the second call stores nothing.
func RecordSample(ctx context.Context, c redis.Cmdable, space keyspace.Space, s Sample) (bool, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return false, fmt.Errorf("encode a sample of the history: %w", err)
	}
	args := []any{s.At.UnixMilli(), SampleSlot.Milliseconds(), MaxSamples, text}
	r := history.Read(ctx, c, []string{space.History()}, args)
	stored := r.Flag()
	if err := r.Err(); err != nil {
		return false, fmt.Errorf("store a sample of the history: %w", err)
	}
	return stored, nil
}

// Samples returns the n newest samples, the newest first. It leaves out what it can't read.
func Samples(ctx context.Context, c redis.Cmdable, space keyspace.Space, n int) ([]Sample, error) {
	lines, err := c.LRange(ctx, space.History(), 0, int64(n)-1).Result()
	if err != nil {
		return nil, fmt.Errorf("read the history: %w", err)
	}
	samples := make([]Sample, 0, len(lines))
	for _, line := range lines {
		at, text, _ := strings.Cut(line, " ")
		ms, err := strconv.ParseInt(at, 10, 64)
		var s Sample
		if err == nil {
			err = json.Unmarshal([]byte(text), &s)
		}
		if err != nil {
			continue
		}
		s.At = time.UnixMilli(ms).UTC()
		samples = append(samples, s)
	}
	return samples, nil
}
