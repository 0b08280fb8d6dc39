package watcher

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

const (
	// typeRetention is how long a type that has no jobs is remembered after a live worker last
	// served it.
	typeRetention = time.Hour
	failBatch     = 100
	// readBlock is how long a read of a ready stream waits for jobs. The fetcher refills an empty
	// stream in less time.
	readBlock = 100 * time.Millisecond
)

// unservedTypes finds the types of one partition that have jobs and no live worker, and fails these
// jobs.
type unservedTypes struct {
	*partition
	// since holds the types that have jobs and no live worker, each with the time at which this
	// process first saw that.
	since map[string]time.Time
}

// fail fails ready jobs of each type that has had jobs and no live worker for NoProcessorTimeout.
// Only the time in which this process was the leader and looked counts: before that, the whole
// installation may have been down. It returns whether there may be more such jobs. With a
// NoProcessorTimeout of 0 it only calls find.
func (u *unservedTypes) fail(ctx context.Context) (bool, error) {
	timeout := u.cfg.NoProcessorTimeout
	if err := u.find(ctx); err != nil || timeout <= 0 {
		return false, err
	}
	ledSince, _ := u.leadership()
	more := false
	for typ, since := range u.since {
		if time.Since(since) < timeout || time.Since(ledSince) < timeout {
			continue
		}
		some, err := u.failReadyJobs(ctx, typ)
		if err != nil {
			return false, err
		}
		more = more || some
	}
	return more, nil
}

// find updates since. On the way it records in Redis, for each served type, that it is served now,
// and deletes types that have no jobs and that no live worker has served for typeRetention.
func (u *unservedTypes) find(ctx context.Context) error {
	workers, err := presence.Workers(ctx, u.Conn, u.Space)
	if err != nil {
		return err
	}
	served := map[string]bool{}
	for _, w := range workers {
		for _, typ := range w.Types {
			served[typ] = true
		}
	}
	types, err := ledger.Types(ctx, u.Conn.Cmd, u.Partition)
	if err != nil {
		return err
	}
	if len(types) == 0 {
		u.since = nil
		return nil
	}
	haveJobs, err := ledger.HaveJobs(ctx, u.Conn.Cmd, u.Partition, types)
	if err != nil {
		return err
	}
	unserved := map[string]time.Time{}
	var servedTypes []redis.Z
	var idle []string
	for i, typ := range types {
		switch since, known := u.since[typ]; {
		case served[typ]:
			servedTypes = append(servedTypes, redis.Z{Score: float64(time.Now().UnixMilli()), Member: typ})
		case !haveJobs[i]:
			idle = append(idle, typ)
		case known:
			unserved[typ] = since
		default: // the score, which is when the type was last served, does not count: the jobs may be much younger
			unserved[typ] = time.Now()
		}
	}
	if len(servedTypes) > 0 {
		if err := u.Conn.Cmd.ZAddXX(ctx, u.Types(), servedTypes...).Err(); err != nil {
			return fmt.Errorf("record served types: %w", err)
		}
	}
	u.since = unserved
	for _, typ := range idle {
		if _, err := ledger.Retire(ctx, u.Conn.Cmd, u.Partition, typ, time.Now().Add(-typeRetention)); err != nil {
			return err
		}
	}
	return nil
}

// failReadyJobs reads a type's ready stream as a worker would and reports its jobs as failed with
// code NO_PROCESSOR, for about a second. It returns whether there may be more jobs: the fetcher
// makes the type's waiting jobs ready as the stream empties.
func (u *unservedTypes) failReadyJobs(ctx context.Context, typ string) (bool, error) {
	key := u.Ready(typ)
	reader := stream.NewReader(u.Conn, keyspace.GroupWorkers, u.ID)
	defer func() {
		_, _ = ledger.DropConsumer(ctx, u.Conn.Cmd, key, keyspace.GroupWorkers, u.ID, 0)
	}()
	for until := time.Now().Add(leaderRenew); time.Now().Before(until); {
		batches, err := reader.Read(ctx, []string{key}, failBatch, readBlock)
		if err != nil || len(batches) == 0 {
			return false, err
		}
		failed, err := u.failEntries(ctx, typ, batches[0].Entries)
		u.metrics.DeadLettered("NO_PROCESSOR", int(failed))
		if err != nil {
			return false, err
		}
		u.log.Warn("failed jobs of a type that no worker serves", "type", typ, "jobs", failed)
	}
	return true, nil
}

// failEntries starts the jobs of these entries and reports them as failed; it returns how many
// failed. It leaves out stale jobs. An entry that is no job stays pending: reclaim quarantines it.
func (u *unservedTypes) failEntries(ctx context.Context, typ string, entries []stream.Entry) (int64, error) {
	type job struct {
		ledger.Job
		entry string
	}
	var jobs []job
	for _, e := range entries {
		if d, err := ledger.ParseJob(ledger.EntryBlob(e.Fields)); err == nil {
			jobs = append(jobs, job{d, e.ID})
		}
	}
	if len(jobs) == 0 {
		return 0, nil
	}
	slices.SortFunc(jobs, func(a, b job) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Ordinal, b.Ordinal))
	})
	var starts []ledger.StartGroup
	for _, j := range jobs {
		if n := len(starts); n == 0 || starts[n-1].Group != j.Group {
			starts = append(starts, ledger.StartGroup{Group: j.Group})
		}
		g := &starts[len(starts)-1]
		g.Jobs = append(g.Jobs, ledger.StartJob{Entry: j.entry, Ordinal: j.Ordinal, Attempt: j.Attempt})
	}
	started, err := ledger.Start(ctx, u.Conn.Cmd, u.Partition, typ, starts)
	if err != nil {
		return 0, err
	}
	reason := fmt.Sprintf(
		"no live worker has served the type %s for %s: start a worker that has a processor for it, then "+
			"retry the group",
		typ, u.cfg.NoProcessorTimeout,
	)
	var outcomes []ledger.GroupOutcome
	for i, j := range jobs {
		if started.Tokens[i] < 0 {
			continue
		}
		if n := len(outcomes); n == 0 || outcomes[n-1].Group != j.Group {
			outcomes = append(outcomes, ledger.GroupOutcome{Group: j.Group})
		}
		g := &outcomes[len(outcomes)-1]
		g.Others = append(g.Others, ledger.OtherJob{
			Entry: j.entry, Ordinal: j.Ordinal, Attempt: int(started.Tokens[i]), Kind: ledger.OutcomeFailed,
			Waits: j.Waits, Queued: []byte(j.Queued), Code: "NO_PROCESSOR", Text: reason,
		})
	}
	r, err := ledger.Outcome(ctx, u.Conn.Cmd, u.Partition, typ, ledger.Congestion{}, outcomes)
	for _, s := range r.Steps {
		u.Tel.RecordStep(ctx, u.Ready(typ), telemetry.JobStep(s))
	}
	return r.Failed, err
}
