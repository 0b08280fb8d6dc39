package watcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// maintenance is the periodic work on one partition: it deletes what is past its retention, and
// checks Redis's setup again.
type maintenance struct {
	*partition
	doneAt time.Time // when the tasks last ran and left nothing to do
	// resultsExpiredTo is a time in Unix ms: this process has deleted the result lines of the
	// groups that ended at or before it.
	resultsExpiredTo float64
	// oldest has an entry for each of the last minutes, the earliest first (see trimEntryIDs).
	oldest []oldestEntry
}

// run runs all maintenance tasks once, if they last had nothing left to do maintenanceInterval ago;
// otherwise it does nothing. If a task has more to do, run returns true, and the next step runs them again. The error of a task is logged and
// doesn't stop the others; but if the leadership or the connection is lost, or ctx has ended, run
// returns at once.
func (m *maintenance) run(ctx context.Context) (bool, error) {
	if time.Since(m.doneAt) <= maintenanceInterval {
		return false, nil
	}
	more := false
	for _, task := range []func(context.Context) (bool, error){
		m.expireGroups, m.expireResults, m.trim, m.trimEntryIDs, m.forgetCallbacks, m.recheckSetup,
	} {
		some, err := task(ctx)
		switch {
		case err == nil:
			more = more || some
		case endsStep(ctx, err):
			return false, err
		case call.IsOOM(err):
			m.logOOM(err)
		default:
			m.log.Error("maintenance task failed, trying again in the next pass", "error", err)
		}
	}
	if !more {
		m.doneAt = time.Now()
	}
	return more, nil
}

// expireGroups deletes groups whose retention is over, at most groupBatch at once. It returns
// whether there may be more.
func (m *maintenance) expireGroups(ctx context.Context) (bool, error) {
	keep := m.cfg.Retention.Groups
	if keep <= 0 {
		return false, nil
	}
	ended, err := m.endedGroups(ctx, "-inf", millisAgo(keep), groupBatch)
	if err != nil {
		return false, err
	}
	for _, z := range ended {
		if err := m.expireGroup(ctx, z.Member.(string)); err != nil {
			return false, err
		}
	}
	return len(ended) == groupBatch, nil
}

// expireGroup deletes a group, and then its owner key, so that its id can be used again.
func (m *maintenance) expireGroup(ctx context.Context, id string) error {
	tenant, err := ledger.TenantOf(ctx, m.Conn.Cmd, m.Partition, id)
	if err != nil {
		return fmt.Errorf("expire group %s: %w", id, err)
	}
	if err := ledger.Expire(ctx, m.Conn.Cmd, m.Partition, id, m.fence, false); err != nil {
		return err
	}
	return ledger.ReleaseID(ctx, m.Conn.Cmd, m.Space, m.Partition, id, tenant)
}

// expireResults deletes the result lines of groups whose results expire before the group does, of
// about groupBatch groups in one call. One process does that once for each group, even if it
// becomes the leader again. It returns whether there may be more.
func (m *maintenance) expireResults(ctx context.Context) (bool, error) {
	keep := m.cfg.Retention.Results
	if keep <= 0 || (m.cfg.Retention.Groups > 0 && keep >= m.cfg.Retention.Groups) {
		return false, nil
	}
	ended, err := m.endedGroups(ctx, "("+formatMillis(m.resultsExpiredTo), millisAgo(keep), groupBatch)
	if err != nil || len(ended) == 0 {
		return false, err
	}
	// The batch may end between groups that ended in the same millisecond. Take all groups of that
	// millisecond now, because the next batch begins behind it.
	last := ended[len(ended)-1].Score
	same, err := m.endedGroups(ctx, formatMillis(last), last, 0)
	if err != nil {
		return false, err
	}
	for _, z := range append(ended, same...) {
		if err := ledger.Expire(ctx, m.Conn.Cmd, m.Partition, z.Member.(string), m.fence, true); err != nil {
			return false, err
		}
	}
	m.resultsExpiredTo = last
	return len(ended) == groupBatch, nil
}

// endedGroups returns the groups that ended between two times, with the times of their ends as
// scores, the earliest first. The text from is the lower bound ("(" before the number excludes it)
// and until the upper one, both in Unix ms; limit bounds the number of groups (0: all).
func (m *maintenance) endedGroups(ctx context.Context, from string, until float64, limit int64) ([]redis.Z, error) {
	ended, err := m.Conn.Cmd.ZRangeByScoreWithScores(ctx, m.Ended(),
		&redis.ZRangeBy{Min: from, Max: formatMillis(until), Count: limit}).Result()
	if err != nil {
		return nil, fmt.Errorf("read ended groups: %w", err)
	}
	return ended, nil
}

func millisAgo(keep time.Duration) float64 { return float64(time.Now().Add(-keep).UnixMilli()) }

// formatMillis formats a time in ms as Redis reads it.
func formatMillis(t float64) string { return strconv.FormatFloat(t, 'f', 0, 64) }

// trim deletes what is older than its retention: ids of applied messages and dead letters of this
// partition, and, in partition 0 only, events and rejected messages. It never has more to do.
func (m *maintenance) trim(ctx context.Context) (bool, error) {
	r := m.cfg.Retention
	streams := map[string]time.Duration{m.DeadLetters(): r.DeadLetters}
	if m.Index() == 0 {
		streams[m.Space.Events()], streams[m.Space.Rejected()] = r.Events, r.DeadLetters
	}
	_, err := m.Conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		if r.MessageIDs > 0 {
			pipe.ZRemRangeByScore(ctx, m.Messages(), "-inf", formatMillis(millisAgo(r.MessageIDs)))
		}
		for stream, keep := range streams {
			if keep > 0 {
				pipe.XTrimMinID(ctx, stream, formatMillis(millisAgo(keep)))
			}
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("trim data that is past its retention: %w", err)
	}
	return false, nil
}

// forgetCallbacks deletes dead callbacks, up to a number.
func (m *maintenance) forgetCallbacks(ctx context.Context) (bool, error) {
	if m.cfg.Retention.Callbacks <= 0 {
		return false, nil
	}
	const most = 1000
	now, err := m.store.Now(ctx)
	if err != nil {
		return false, err
	}
	n, err := ledger.ForgetCallbacks(ctx, m.Conn.Cmd, m.Partition, now.Add(-m.cfg.Retention.Callbacks), most)
	return n == most, err
}

// recheckSetup repeats checks of the process's start, in partition 0 only: that Redis evicts no
// keys, and that the number of partitions in Redis is the configured one. A lost number is written
// again, so that no process with another number can start.
func (m *maintenance) recheckSetup(ctx context.Context) (bool, error) {
	if m.Index() > 0 {
		return false, nil
	}
	return false, errors.Join(stage.CheckPartitions(ctx, m.Conn, m.Space), m.Conn.CheckEviction(ctx))
}

// maxIngestFreeze is the longest freeze of an ingest process (for example by the suspension of its
// machine) after which it can still finish an entry that it had read, without storing it twice.
const maxIngestFreeze = 5 * time.Minute

// oldestEntry has the id of the oldest entry that Redis could deliver from the ingest stream at the
// time `at`.
type oldestEntry struct {
	id string
	at time.Time
}

// trimEntryIDs deletes the ids of applied entries of the ingest stream that can't be applied again:
// those that Redis could not deliver any more maxIngestFreeze ago. It waits for so long because a
// frozen ingest process that held an entry may apply it when it continues, although another process
// has applied and acknowledged it.
func (m *maintenance) trimEntryIDs(ctx context.Context) (bool, error) {
	if n := len(m.oldest); n == 0 || time.Since(m.oldest[n-1].at) > time.Minute {
		id, err := m.oldestIngestEntry(ctx)
		if err != nil {
			return false, err
		}
		m.oldest = append(m.oldest, oldestEntry{id, time.Now()})
	}
	for len(m.oldest) > 0 && time.Since(m.oldest[0].at) > maxIngestFreeze {
		id, err := stream.ParseID(m.oldest[0].id)
		if err == nil {
			err = m.Conn.Cmd.ZRemRangeByScore(ctx, m.Entries(), "-inf", "("+strconv.FormatUint(id.MS, 10)).Err()
		}
		if err != nil {
			return false, fmt.Errorf("trim entry ids: %w", err)
		}
		m.oldest = m.oldest[1:]
	}
	return false, nil
}

// oldestIngestEntry returns the id of the oldest entry of the ingest stream, whether it is pending,
// undelivered, or without an owner. If the stream is empty, it returns the id of an entry that was
// delivered, and all older ones with it; 0-0 if there is none.
func (m *maintenance) oldestIngestEntry(ctx context.Context) (string, error) {
	groups, err := m.Conn.Cmd.XInfoGroups(ctx, m.Space.Ingest()).Result()
	if call.IsUnavailable(err) {
		return "", err
	}
	for _, g := range groups { // no groups: no message was ever submitted
		if g.Name != keyspace.GroupIngest {
			continue
		}
		first, err := m.Conn.Cmd.XRangeN(ctx, m.Space.Ingest(), "-", "+", 1).Result()
		if err != nil {
			return "", fmt.Errorf("read the oldest message: %w", err)
		}
		if len(first) > 0 {
			return first[0].ID, nil
		}
		return g.LastDeliveredID, nil
	}
	return "0-0", nil
}

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
// jobs if the configuration says so. It also deletes idle types. It has a loop of its own, because
// there may be thousands of types.
type unservedTypes struct {
	*partition
	// since holds the types that have jobs and no live worker, each with the time at which this
	// process first saw that.
	since map[string]time.Time
}

// step does the work of the leader, if this process leads, and returns how long to wait before the
// next step.
func (u *unservedTypes) step(ctx context.Context) (time.Duration, error) {
	if _, leads := u.leadership(); !leads {
		u.since = nil
		return leaderRenew, nil
	}
	more, err := u.fail(ctx)
	if err != nil || more {
		return 0, err
	}
	if timeout := u.cfg.NoProcessorTimeout; timeout > 0 {
		return min(maintenanceInterval, timeout), nil
	}
	return maintenanceInterval, nil
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
	block := time.Duration(0) // most types have no jobs left: don't wait for each
	for until := time.Now().Add(leaderRenew); time.Now().Before(until); block = readBlock {
		batches, err := reader.Read(ctx, []string{key}, failBatch, block)
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

const (
	// busiestRate is how many active tenants one process reads in a second at most, so that the
	// searches take less than 2% of Redis's time.
	busiestRate = 10_000
)

// findBusiest returns a function that is to be called every second. Once in groups.BusiestEvery it finds
// and stores the busiest tenants of each partition that this process leads, one partition after the
// other.
func findBusiest(partitions []*partition) func(context.Context) error {
	var began time.Time
	return func(ctx context.Context) error {
		if time.Since(began) < groups.BusiestEvery {
			return nil
		}
		var errs error
		now := time.Now()
		for _, p := range partitions {
			if _, leads := p.leadership(); !leads {
				continue
			}
			began = now
			if err := p.store.MeasureBusiest(ctx, p.Partition, pace); err != nil {
				errs = errors.Join(errs, fmt.Errorf("busiest tenants of partition %d: %w", p.Index(), err))
			}
		}
		return errs
	}
}

// pace sleeps after n tenants were read, so that at most busiestRate are read in a second.
func pace(ctx context.Context, n int) error {
	return redisx.Sleep(ctx, time.Duration(n)*time.Second/busiestRate)
}
