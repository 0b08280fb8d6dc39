package worker

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// maxPrefetch is how many jobs a process prefetches at most for each partition; partitions beyond
// maxPrefetchPartitions don't raise the number. maxBatch bounds the jobs of one script call.
// maxBatchBytes bounds the outcomes that one call reports; one task may exceed it.
const (
	maxPrefetch           = 2 * maxBatch // two batches: one is read while the other one waits for slots
	maxPrefetchPartitions = 8
	maxBatch              = 200
	maxBatchBytes         = 1 << 20
)

// prefetchFor is how much work a process prefetches: the jobs that all its slots together are
// expected to run in this time. Less would leave slots idle while the next batch is read; more
// would keep jobs from other processes that could run them.
const prefetchFor = 3 * time.Millisecond

// unreported bounds the finished jobs whose outcomes Redis has not accepted yet: a process that
// prefetches p jobs may hold about unreported·p of them (see freeCapacity), so that the outcomes of
// quick jobs can be on their way to Redis while the next jobs run. While jobs are long, p is 0: the
// process then holds no more jobs than it has slots.
const unreported = 2

// feed reads the ready streams of one partition, starts their jobs, and reports the outcomes of
// these jobs.
type feed struct {
	w         *Worker
	partition keyspace.Partition
	reader    *stream.Reader
	reports   *reportQueue
}

// freeCapacity returns how many more jobs this process may read; n ≤ 0: none. There are two bounds:
// unfinished jobs ≤ slots + prefetch, and held jobs (unfinished or not yet reported) ≤ slots +
// (1+unreported)·prefetch. The second one is looser, because a finished job whose report is held
// back takes no work from other processes.
//
// So that a read fetches many jobs, n is 0 while more than resumeAt jobs are unfinished, although
// the bounds would allow a few more. resumeAt says when the caller should look again if n ≤ 0: when
// at most resumeAt jobs are unfinished; -1: after any report. During isolation n is 0 and resumeAt
// -1.
func (w *Worker) freeCapacity() (n, resumeAt int) {
	if w.isolation.busy() {
		return 0, -1
	}
	size := w.slots.singles()
	prefetch := 0
	if w.meanRunTime.value() > 0 { // a job has ended
		bound := maxPrefetch * min(len(w.feeds), maxPrefetchPartitions)
		prefetch = min(bound, int(int64(size)*int64(prefetchFor)/int64(w.expectedRunTime())))
	}
	unfinished, held := w.held.unfinished.value(), w.held.active.value()-w.held.batched.value()
	if resumeAt = size + prefetch - max(1, prefetch/2); unfinished > resumeAt {
		return 0, resumeAt
	}
	return min(size+prefetch-unfinished, size+prefetch+unreported*prefetch-held), -1
}

// step reads one batch of entries of the types that are not gated, and starts their jobs; see
// gatedFeed for the gated types. While the process has no free capacity, it reads nothing and waits
// until there may be some, or until ctx ends. It always returns 0 as the time to wait.
func (f *feed) step(ctx context.Context) (time.Duration, error) {
	changed := f.w.held.nextChange()
	capacity, resumeAt := f.w.freeCapacity()
	if capacity <= 0 {
		f.w.held.setResumeAt(resumeAt)
		select {
		case <-changed:
		case <-ctx.Done():
		}
		return 0, nil
	}
	_, err := f.readEntries(ctx, f.w.ungated, capacity, f.w.cfg.Block, f.startEntries)
	return 0, err
}

// readEntries reads entries from the ready streams of types in this partition, and calls use with
// the entries of one type, at most maxBatch at a time; use returns whether suspects were among
// them. It asks for this partition's part of capacity, at most maxBatch entries, but at least one
// of each stream. It waits up to block for the first entry. While suspects limit reads (see
// withReadLimit), it asks for fewer entries and does not wait. more says that a stream may have
// further entries.
func (f *feed) readEntries(
	ctx context.Context, types []string, capacity int, block time.Duration,
	use func(ctx context.Context, typ string, entries []stream.Entry) (suspects bool),
) (more bool, err error) {
	streams := make([]string, len(types))
	for i, typ := range types {
		streams[i] = f.partition.Ready(typ)
	}
	// Each feed asks for its part of the capacity: the feeds of all partitions read at the same
	// time, and a feed does not know what the others will find.
	count := max(1, min(capacity/len(f.w.feeds), maxBatch)/len(streams))
	return more, f.w.isolation.withReadLimit(func(most int) (suspects bool, err error) {
		if most > 0 {
			count, block = min(count, most), 0
		}
		batches, err := f.reader.ReadSmall(ctx, streams, count, block)
		if err != nil {
			return true, err
		}
		for i := range batches {
			more = more || len(batches[i].Entries) >= count
			typ := types[slices.Index(streams, batches[i].Stream)]
			for entries := range slices.Chunk(batches[i].Entries, maxBatch) {
				suspects = use(ctx, typ, entries) || suspects
			}
		}
		return suspects, nil
	})
}

// startEntries starts the jobs of entries, which are of type typ, and gives them to the slots. It
// hands suspects to isolation, and reports whether there were any. It quarantines unreadable
// entries, and drops jobs that must not run (see startTasks). It releases jobs that it can't start
// or whose payload it can't load, and all jobs if ctx has ended; while isolation is busy, it
// releases all but the suspect that isolation has accepted. If Redis does not accept a release, the
// entry stays pending until the dispatcher reclaims it.
func (f *feed) startEntries(ctx context.Context, typ string, entries []stream.Entry) (suspects bool) {
	tasks, suspects := f.takeEntries(ctx, typ, entries)
	if len(tasks) == 0 {
		return suspects
	}
	started, err := f.startTasks(ctx, typ, tasks)
	if err != nil {
		release(tasks...)
		return suspects
	}
	f.w.held.track(started...)
	if f.loadPayloads(ctx, started) != nil || !f.w.slots.add(started) {
		release(started...)
	}
	return suspects
}

// takeEntries returns the tasks of entries that may be started now, and holds them. It hands
// suspects to isolation, and reports whether there were any. If ctx has ended, it releases all
// tasks and returns none; while isolation is busy, it releases all but the suspect that isolation
// has accepted.
func (f *feed) takeEntries(
	ctx context.Context, typ string, entries []stream.Entry,
) (tasks []*task, suspects bool) {
	tasks, suspects = f.parseEntries(ctx, typ, entries)
	if len(tasks) == 0 {
		return nil, suspects
	}
	f.w.held.move(0, stateRead, tasks...)
	if ctx.Err() == nil {
		tasks = f.isolateSuspects(tasks)
	}
	if ctx.Err() != nil || f.w.isolation.busy() {
		release(tasks...)
		return nil, suspects
	}
	return tasks, suspects
}

// parseEntries returns a task for each entry, once even if entries has it twice, ordered by group
// and ordinal. It quarantines entries that can't be read or whose type is not typ. The flag
// suspects says that at least one task is a suspect.
func (f *feed) parseEntries(
	ctx context.Context, typ string, entries []stream.Entry,
) (tasks []*task, suspects bool) {
	tasks = make([]*task, 0, len(entries))
	proc, _ := f.w.procs[typ].(processor.Processor)
	gate, batches, parser := f.w.gates[typ], f.w.batches[typ], ledger.Parser{}
	for i := range entries {
		e := &entries[i]
		t := &task{entryID: e.ID, feed: f, proc: proc, gate: gate, batchType: batches}
		if batches != nil {
			t.proc = batches.single
		}
		err := parser.Parse(e.Fields, &t.Job)
		if err == nil && t.Type != typ {
			err = fmt.Errorf("its type is %q", t.Type)
		}
		if err != nil {
			f.quarantine(ctx, typ, *e, err)
			continue
		}
		t.currentAttempt = t.Attempt
		if t.suspect() {
			t.removed, suspects = make(chan struct{}), true
			if batches != nil {
				t.gate = batches.gate
			}
		}
		tasks = append(tasks, t)
	}
	slices.SortFunc(tasks, byJob)
	tasks = slices.CompactFunc(tasks, func(a, b *task) bool {
		return a.Group == b.Group && a.Ordinal == b.Ordinal && a.Attempt == b.Attempt && a.entryID == b.entryID
	})
	return tasks, suspects
}

// isolateSuspects removes the suspects from tasks and returns the rest. It hands each suspect to
// isolation, where its lease is kept while it waits; it releases the suspects that isolation does
// not accept now.
func (f *feed) isolateSuspects(tasks []*task) []*task {
	return slices.DeleteFunc(tasks, func(t *task) bool {
		if !t.suspect() {
			return false
		}
		f.w.held.track(t) // before add: once added, the task belongs to isolation
		if !f.w.isolation.add(t) {
			f.w.held.untrack(t)
			release(t)
		}
		return true
	})
}

// startTasks marks the jobs of tasks as in flight in Redis, and returns those that this process
// must run now. tasks must be ordered by group. It drops the jobs that must not run (stale, of a
// cancelled or deleted group, or paused) and stops holding their tasks. It repeats the call as
// retryStep does; after an error no task is started here, and the caller releases all of them. If
// the answer to a call that took effect is lost, the next call gives the jobs a new attempt:
// currentAttempt is then above the Attempt of the entry.
func (f *feed) startTasks(ctx context.Context, typ string, tasks []*task) ([]*task, error) {
	groups, jobs := make([]ledger.StartGroup, 0, 8), make([]ledger.StartJob, len(tasks))
	first := 0
	for i, t := range tasks {
		jobs[i] = ledger.StartJob{
			Entry: t.entryID, Ordinal: t.Ordinal, Attempt: t.Attempt, Failed: t.Retries+t.Throttles+t.Losses > 0,
		}
		if i == len(tasks)-1 || tasks[i+1].Group != t.Group {
			groups = append(groups, ledger.StartGroup{Group: t.Group, Jobs: jobs[first : i+1]})
			first = i + 1
		}
	}
	var r ledger.StartReply
	err := f.retryStep(ctx, "start jobs", func(ctx context.Context) (err error) {
		r, err = ledger.Start(ctx, f.w.Conn.Cmd, f.partition, typ, groups)
		return err
	})
	if err != nil {
		return nil, err
	}
	now, i := time.Now(), 0
	started, dropped := make([]*task, 0, len(tasks)), []*task(nil)
	delays := make([]time.Duration, 0, len(tasks)) // of first attempts, since they might start
	timeout := f.w.cfg.timeoutOf(typ)
	for g := range groups {
		r.Groups[g].JobTimeout = cmp.Or(r.Groups[g].JobTimeout, timeout)
		for range groups[g].Jobs {
			t := tasks[i]
			t.terms = r.Groups[g]
			if r.Tokens[i] < 0 {
				dropped = append(dropped, t)
				t.returnPass(errNotStarted)
				if r.Tokens[i] == ledger.TokenCancelled && t.Trace != "" {
					f.w.Tel.RecordStep(ctx, f.partition.Ready(typ), telemetry.JobStep{
						Name: "cancel", Tenant: t.terms.Tenant, Group: t.Group,
						Ordinal: t.Ordinal, Attempt: t.Attempt, Trace: t.Trace,
					})
				}
			} else {
				t.currentAttempt, t.inFlight, t.startedAt = int(r.Tokens[i]), true, now
				if e, ok := r.LastErrors[i]; ok {
					t.lastError = &processor.AttemptError{
						Code: e.Code, Text: e.Error, Attempt: e.Attempts, At: e.Time(),
					}
				}
				started = append(started, t)
				if t.Attempt == 1 {
					f.w.metrics.Started(now.Sub(t.Accepted))
					turn, rate, _ := t.Waited()
					delays = append(delays, turn+rate+time.Duration(r.AtUS-t.SinceMS*1000)*time.Microsecond)
				}
			}
			i++
		}
	}
	if len(dropped) > 0 {
		f.w.Tel.Log.Debug("dropped stale entries", "type", typ, "entries", len(dropped))
		f.w.held.remove(dropped)
	}
	f.w.rates.started(now, typ, len(started), delays...)
	if f.w.cfg.OnStart != nil {
		for _, t := range started {
			f.w.cfg.OnStart(r.AtUS, f.partition.Index(), typ, t.terms.Tenant, t.Group, t.Ordinal, t.currentAttempt)
		}
	}
	return started, nil
}

// loadPayloads sets loadedPayload and separatePayload of each task. It fetches large payloads,
// which the entries don't contain, from Redis, and repeats that as retryStep does. Without an
// error, an empty loadedPayload means that the payload is lost.
func (f *feed) loadPayloads(ctx context.Context, tasks []*task) error {
	var large []*task
	for _, t := range tasks {
		t.loadedPayload = t.Payload
		if t.loadedPayload == "" {
			t.separatePayload = true
			large = append(large, t)
		}
	}
	if len(large) == 0 {
		return nil
	}
	jobs := make([]ledger.JobRef, len(large))
	for i, t := range large {
		jobs[i] = ledger.JobRef{Group: t.Group, Ordinal: t.Ordinal}
	}
	return f.retryStep(ctx, "load payloads", func(ctx context.Context) error {
		payloads, err := ledger.Payloads(ctx, f.w.Conn.Cmd, f.partition, jobs)
		for i := range payloads {
			large[i].loadedPayload = payloads[i] // "" when the payload is lost; callProcessor reports that
		}
		return err
	})
}

// retryStep calls step, which must be safe to repeat, until it works, with backoff. It returns the
// last error when ctx ends. It also returns the error of a fifth failure that is not an outage of
// Redis, because a further try would fail as well; outages don't count. It logs the first failure
// only, with the name what.
func (f *feed) retryStep(ctx context.Context, what string, step func(context.Context) error) error {
	backoff := redisx.Backoff{Min: 20 * time.Millisecond, Max: 2 * time.Second}
	warned := false
	for failures := 0; ; {
		err := step(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if !call.IsUnavailable(err) {
			if failures++; failures == 5 {
				return err
			}
		}
		if !warned {
			warned = true
			f.w.Tel.Log.Warn("redis step failed, trying again", "step", what, "error", err)
		}
		if redisx.Sleep(ctx, backoff.Next()) != nil {
			return err
		}
	}
}

// release gives back tasks that were read but will not run in this process, so that other processes
// can run the jobs. It sets their outcome to released and queues its report; it does not wait for
// Redis. The caller must own the tasks.
func release(tasks ...*task) {
	for _, t := range tasks {
		t.releaseFrom(t.currentState())
	}
}

// releaseFrom releases the task if it is in the state from; otherwise another goroutine owns it.
func (t *task) releaseFrom(from state) {
	if t.feed.w.held.move(from, stateEnded, t) {
		t.released = true
		t.returnPass(errNotStarted)
		t.feed.reports.add(t)
	}
}

// quarantine moves an entry that can't be read as a job of type typ from the ready stream to the
// partition's list of quarantined entries, with the reason, for an operator. The list keeps the
// newest 1,000 entries, and of each about the first 1,024 characters. If Redis fails, the entry
// stays pending, and the dispatcher quarantines it when it reclaims it.
func (f *feed) quarantine(ctx context.Context, typ string, e stream.Entry, reason error) {
	f.w.Tel.Log.Warn("quarantined an unreadable entry",
		"partition", f.partition.Index(), "type", typ, "entry", e.ID, "reason", reason)
	to := stream.Quarantine{Key: f.partition.Quarantine(), Source: "ready:" + typ}
	err := f.reader.Quarantine(ctx, f.partition.Ready(typ), to, e, reason)
	if err != nil {
		f.w.Tel.Log.Error("quarantine failed, the entry stays pending", "entry", e.ID, "error", err)
	}
}
