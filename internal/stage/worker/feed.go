package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// maxPrefetch, for each of up to maxParts partitions, bounds what one process starts beyond what
// runs; maxBatch and maxBatchBytes bound one script.
const (
	maxPrefetch           = 2 * maxBatch // so that half of it is a batch
	maxPrefetchPartitions = 8
	maxBatch              = 200
	maxBatchBytes         = 1 << 20
)

// prefetchFor is how much work a process takes in advance: it must not idle while the next batch is
// on its way, and must not hold what another could run.
const prefetchFor = 3 * time.Millisecond

// unreported is how many times as much as that may have ended and wait for Redis while more is
// read: two batches of quick jobs, and none of long ones, of which a process holds what it runs.
const unreported = 2

// partition feeds the pool from one partition and settles what came of it.
type partitionFeed struct {
	*Worker
	partition keyspace.Partition
	reader    *stream.Reader
	reports   *reportQueue
}

// room is how many more jobs the process may take. While enough wait for a slot it is none, so that
// a read brings a batch: until no more than few are open, or, where that is negative, until
// something is let go. What has ended counts apart, within bounds, since nobody else could run it.
func (w *Worker) freeCapacity() (n, resumeAt int) {
	if w.isolation.busy() {
		return 0, -1
	}
	size, _ := w.slots.sizeAndActive()
	prefetch := 0
	if d := w.expectedRunTime(); d > 0 {
		prefetch = min(maxPrefetch*min(len(w.feeds), maxPrefetchPartitions), int(int64(size)*int64(prefetchFor)/int64(d)))
	}
	unfinished, held := int(w.held.unfinished.Load()), int(w.held.count.Load())
	if resumeAt = size + prefetch - max(1, prefetch/2); unfinished > resumeAt {
		return 0, resumeAt
	}
	return min(size+prefetch-unfinished, size+prefetch+unreported*prefetch-held), -1
}

// feed reads and starts one batch.
func (p *partitionFeed) step(ctx context.Context) (time.Duration, error) {
	changed := p.held.nextChange()
	capacity, resumeAt := p.freeCapacity()
	if pause, ok := p.isolation.nextSearch(); ok {
		err := p.readEntries(ctx, 4)
		select {
		case <-changed:
		case <-time.After(pause):
		case <-ctx.Done():
		}
		return 0, err
	}
	if capacity <= 0 {
		p.held.setResumeAt(resumeAt)
		select {
		case <-changed:
		case <-ctx.Done():
		}
		return 0, nil
	}
	return 0, p.readEntries(ctx, capacity)
}

// read reads and takes about so many entries.
func (p *partitionFeed) readEntries(ctx context.Context, capacity int) error {
	streams := make([]string, len(p.types))
	for i, typ := range p.types {
		streams[i] = p.partition.Ready(typ)
	}
	// The partitions read side by side, none knowing what the others find: each asks for its
	// part of the room.
	count := max(1, min(capacity/len(p.feeds), maxBatch)/len(streams))
	return p.isolation.withReadLimit(func(most int) (suspects bool, err error) {
		block := p.cfg.Block
		if most > 0 {
			count, block = min(count, most), 0
		}
		batches, err := p.reader.ReadSmall(ctx, streams, count, block)
		if err != nil {
			return true, err
		}
		for i := range batches {
			typ := p.types[slices.Index(streams, batches[i].Stream)]
			for entries := range slices.Chunk(batches[i].Entries, maxBatch) {
				suspects = p.startEntries(ctx, typ, entries) || suspects
			}
		}
		return suspects, nil
	})
}

// take starts a batch of entries and hands it to the pool. What can't be started stays pending: it
// is asked for again until Redis answers or the process stops, and then it is the dispatcher's. It
// says whether there were suspects.
func (p *partitionFeed) startEntries(ctx context.Context, typ string, entries []stream.Entry) (suspects bool) {
	tasks, suspects := p.parseEntries(ctx, typ, entries)
	if len(tasks) == 0 {
		return suspects
	}
	p.held.reserve(len(tasks))
	if ctx.Err() != nil {
		p.release(tasks)
		return suspects
	}
	if tasks = p.isolateSuspects(tasks); len(tasks) == 0 {
		return suspects
	}
	if p.isolation.busy() {
		p.release(tasks)
		return suspects
	}
	started, err := p.startTasks(ctx, typ, tasks)
	if err != nil {
		p.release(tasks)
		return suspects
	}
	p.held.track(started)
	if p.loadPayloads(ctx, started) != nil {
		p.release(started)
		return suspects
	}
	p.slotQueue.add(started)
	return suspects
}

// tasks reads a batch of entries, in the order of their jobs, and sets aside what is none.
func (p *partitionFeed) parseEntries(ctx context.Context, typ string, entries []stream.Entry) (tasks []*task, suspects bool) {
	tasks = make([]*task, 0, len(entries))
	proc, parser := p.procs[typ], ledger.Parser{}
	for i := range entries {
		e := &entries[i]
		t := &task{entryID: e.ID, feed: p, proc: proc}
		err := parser.Parse(e.Fields, &t.Job)
		if err == nil && t.Type != typ {
			err = fmt.Errorf("its type is %q", t.Type)
		}
		if err != nil {
			p.quarantine(ctx, typ, *e, err)
			continue
		}
		t.currentAttempt = t.Attempt
		if t.suspect() {
			t.removed, suspects = make(chan struct{}), true
		}
		tasks = append(tasks, t)
	}
	slices.SortFunc(tasks, byJob)
	tasks = slices.CompactFunc(tasks, func(a, b *task) bool {
		return a.Group == b.Group && a.Ordinal == b.Ordinal && a.Attempt == b.Attempt && a.entryID == b.entryID
	})
	return tasks, suspects
}

// setApart has suspects run alone, whose leases are kept while they wait, hands those back that may
// not wait here, and returns what is none.
func (p *partitionFeed) isolateSuspects(tasks []*task) []*task {
	return slices.DeleteFunc(tasks, func(t *task) bool {
		if !t.suspect() {
			return false
		}
		p.held.track([]*task{t}) // first: once taken, it is not this goroutine's any more
		if !p.isolation.add(t) {
			p.held.untrack(t)
			p.release([]*task{t})
		}
		return true
	})
}

// start asks for the tasks until there is an answer. A lost answer makes the second one
// raise the attempt.
func (p *partitionFeed) startTasks(ctx context.Context, typ string, tasks []*task) ([]*task, error) {
	groups, jobs := make([]ledger.StartGroup, 0, 8), make([]ledger.StartJob, len(tasks))
	first := 0
	for i, t := range tasks {
		jobs[i] = ledger.StartJob{Entry: t.entryID, Ordinal: t.Ordinal, Attempt: t.Attempt}
		if i == len(tasks)-1 || tasks[i+1].Group != t.Group {
			groups = append(groups, ledger.StartGroup{Group: t.Group, Jobs: jobs[first : i+1]})
			first = i + 1
		}
	}
	var r ledger.StartReply
	err := p.retryStep(ctx, "start jobs", func(ctx context.Context) (err error) {
		r, err = ledger.Start(ctx, p.conn.Cmd, p.partition, typ, groups)
		return err
	})
	if err != nil {
		return nil, err
	}
	now, order, i := time.Now(), p.startCount.Add(int64(len(tasks)))-int64(len(tasks)), 0
	started, dropped := make([]*task, 0, len(tasks)), []*task(nil)
	for g := range groups {
		for range groups[g].Jobs {
			t := tasks[i]
			t.terms = r.Groups[g]
			if r.Tokens[i] < 0 {
				dropped = append(dropped, t)
			} else {
				t.currentAttempt, t.inFlight, t.startedAt, t.startOrder = int(r.Tokens[i]), true, now, order+int64(i)
				started = append(started, t)
				if t.Attempt == 1 {
					p.metrics.Started(now.Sub(t.Accepted))
				}
			}
			i++
		}
	}
	if len(dropped) > 0 {
		p.tel.Log.Debug("dropped stale entries", "type", typ, "entries", len(dropped))
		p.held.markFinished(len(dropped))
		p.held.remove(dropped)
	}
	p.startRates.add(typ, len(started))
	p.logStarts(r.AtUS, typ, started)
	return started, nil
}

// log writes down what was started, in an experiment.
func (p *partitionFeed) logStarts(at int64, typ string, started []*task) {
	if p.cfg.Journal == nil {
		return
	}
	starts := make([]journal.Start, len(started))
	for i, t := range started {
		starts[i] = journal.Start{Tenant: t.terms.Tenant, Group: t.Group, Ordinal: t.Ordinal, Attempt: t.currentAttempt}
	}
	p.cfg.Journal.Starts(at, p.partition.Index(), typ, starts)
}

// loadPayloads fetches the payloads that are too large to travel.
func (p *partitionFeed) loadPayloads(ctx context.Context, tasks []*task) error {
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
	return p.retryStep(ctx, "load payloads", func(ctx context.Context) error {
		replies := make([]*redis.StringCmd, len(large))
		_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for i, t := range large {
				replies[i] = pipe.HGet(ctx, p.partition.Payloads(t.Group), fmt.Sprint(t.Ordinal))
			}
			return nil
		})
		if err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		for i, t := range large {
			// Each reply has its own error: behind a payload that is gone the connection
			// may have failed.
			if err := replies[i].Err(); err != nil && !errors.Is(err, redis.Nil) {
				return err
			}
			t.loadedPayload = replies[i].Val() // "" when it is gone: run reports that
		}
		return nil
	})
}

// insist repeats an idempotent step with backoff until it works or ctx ends. An error that is not
// Redis being away is given up after a few tries: repeating would not mend it.
func (p *partitionFeed) retryStep(ctx context.Context, what string, step func(context.Context) error) error {
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
			p.tel.Log.Warn("redis does not answer as it should, trying again", "step", what, "error", err)
		}
		if redisx.Sleep(ctx, backoff.Next()) != nil {
			return err
		}
	}
}

// handBack reports tasks that were read but will not run here.
func (p *partitionFeed) release(tasks []*task) {
	for _, t := range tasks {
		if t.outcomeSet.CompareAndSwap(false, true) {
			t.released = true
			p.queueReport(t)
		}
	}
}

// end has a task reported that has ended.
func (p *partitionFeed) queueReport(t *task) {
	p.reports.add(t)
	p.held.markFinished(1)
}

// setAside keeps an entry that is no job for a person to look at.
func (p *partitionFeed) quarantine(ctx context.Context, typ string, e stream.Entry, reason error) {
	p.tel.Log.Warn("set an unreadable entry aside",
		"partition", p.partition.Index(), "type", typ, "entry", e.ID, "reason", reason)
	text := fmt.Sprintf("ready:%s %s: %v: %.1024q", typ, e.ID, reason, fmt.Sprint(e.Fields))
	_, err := p.conn.Cmd.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		pipe.LPush(ctx, p.partition.Garbage(), text)
		pipe.LTrim(ctx, p.partition.Garbage(), 0, 999)
		pipe.XAck(ctx, p.partition.Ready(typ), keyspace.GroupWorkers, e.ID)
		pipe.XDel(ctx, p.partition.Ready(typ), e.ID)
		return nil
	})
	if err != nil {
		p.tel.Log.Error("set aside entry failed, it stays pending", "entry", e.ID, "error", err)
	}
}
