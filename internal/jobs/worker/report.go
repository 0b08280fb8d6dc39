package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// linger is how long the first outcome of a batch waits for further ones while other jobs run.
const linger = time.Millisecond

// reportOutcomes reports the outcomes in the report queue to Redis, and adds them to the metrics,
// until the queue is closed and empty. It reports the outcomes of each type in a call of its own.
// While one batch is sent, the next one collects, so batches grow with the load.
func (f *feed) reportOutcomes(ctx context.Context) {
	timer := time.NewTimer(linger)
	defer timer.Stop()
	for f.reports.wait() {
		timer.Reset(linger)
		for expired := false; !expired && !f.reports.hasAtLeast(min(maxBatch, f.w.held.active.value())); {
			select {
			case <-f.reports.wake:
			case <-timer.C:
				expired = true
			}
		}
		batch := f.reports.take(maxBatch, maxBatchBytes)
		slices.SortFunc(batch, func(a, b *task) int { return cmp.Or(cmp.Compare(a.Type, b.Type), byJob(a, b)) })
		for len(batch) > 0 {
			n := 1
			for n < len(batch) && batch[n].Type == batch[0].Type {
				n++
			}
			f.recordMetrics(batch[:n])
			f.reportBatch(ctx, batch[:n])
			batch = batch[n:]
		}
	}
}

// byJob orders tasks by group, then by ordinal.
func byJob(a, b *task) int {
	if a.Group != b.Group {
		return cmp.Compare(a.Group, b.Group)
	}
	return cmp.Compare(a.Ordinal, b.Ordinal)
}

// recordMetrics adds the attempts of batch, which are all of one type, to the metrics and to the
// mean run times. A released or deferred attempt counts only for the wait times and the mean run
// time. An attempt that never ran counts for nothing.
func (f *feed) recordMetrics(batch []*task) {
	var ran, succeeded, failed, timedOut int
	var took time.Duration
	for _, t := range batch {
		if t.runStart == 0 {
			continue
		}
		ran, took = ran+1, took+t.runTime
		f.w.metrics.Waited(t.Waited())
		switch {
		case t.released, t.verdict.Kind == processor.Defer:
			continue
		case t.verdict.Kind == processor.Done:
			succeeded++
		default:
			failed++
			if t.verdict.Code == processor.CodeTimeout {
				timedOut++
			}
		}
		f.w.metrics.Ran(t.runTime)
	}
	f.w.rates.ran(batch[0].Type, ran, took)
	f.w.metrics.Ended(succeeded, failed, timedOut)
}

// reportBatch reports the outcomes of batch, which are of one type and ordered by byJob, and stops
// holding its tasks, whether that works or not. It repeats the call as retryStep does; repeated
// outcomes are stale and change nothing. If Redis refuses the batch, it reports each task on its
// own. A job whose outcome can't be reported runs again after its lease has ended.
func (f *feed) reportBatch(ctx context.Context, batch []*task) {
	typ, groups := batch[0].Type, f.groupOutcomes(batch)
	var r ledger.OutcomeReply
	err := f.retryStep(ctx, "report outcomes", func(ctx context.Context) (err error) {
		r, err = ledger.Outcome(ctx, f.w.Conn.Cmd, f.partition, typ, f.w.waits.Load().congestion, groups)
		return err
	})
	if err != nil && len(batch) > 1 && ctx.Err() == nil {
		for i := range batch { // one task may make Redis refuse the whole batch
			f.reportBatch(ctx, batch[i:i+1])
		}
		return
	}
	f.w.held.remove(batch)
	if err != nil {
		f.w.Tel.Log.Error("outcomes could not be reported, the jobs will run again",
			"type", typ, "jobs", len(batch), "error", err)
		return
	}
	f.countRepeats(typ, groups)
	f.countDead(batch, int(r.Failed))
	for _, s := range r.Steps {
		f.w.Tel.RecordStep(ctx, f.partition.Ready(typ), telemetry.JobStep(s))
	}
	if r.Stale > 0 {
		f.w.metrics.Stale(int(r.Stale))
		f.w.Tel.Log.Info("stale outcomes changed nothing", "type", typ, "stale", r.Stale)
	}
}

// countDead adds the n jobs of a batch that have failed to the metrics, by reason. If some of the
// failures were stale, it is not known which: the first n count.
func (f *feed) countDead(batch []*task, n int) {
	for _, t := range batch {
		if t.deadReason != "" && n > 0 {
			f.w.metrics.DeadLettered(t.deadReason, 1)
			n--
		}
	}
}

// countRepeats adds the jobs of a type that will run again to the metrics: those that were
// throttled, deferred, or are retried.
func (f *feed) countRepeats(typ string, groups []ledger.GroupOutcome) {
	retried := 0
	for _, g := range groups {
		for _, o := range g.Others {
			switch o.Kind {
			case ledger.OutcomeThrottled, ledger.OutcomeRetry:
				retried++
			case ledger.OutcomeDeferred:
				f.w.metrics.Deferred(typ)
			}
		}
	}
	f.w.metrics.Retried(retried)
}

// groupOutcomes returns the outcomes of batch, which is ordered by byJob, by group.
func (f *feed) groupOutcomes(batch []*task) []ledger.GroupOutcome {
	size := 0
	for _, t := range batch {
		size += len(t.result) + resultLineBytes
	}
	lines, done := make([]byte, 0, size), make([]ledger.DoneJob, 0, len(batch))
	groups := make([]ledger.GroupOutcome, 0, 8)
	for _, t := range batch {
		if n := len(groups); n == 0 || groups[n-1].Group != t.Group {
			groups = append(groups, ledger.GroupOutcome{Group: t.Group, Done: done[len(done):]})
		}
		g := &groups[len(groups)-1]
		if !t.released && t.verdict.Kind != processor.Defer && t.runStart != 0 {
			g.Took, g.Ran = g.Took+t.runTime, g.Ran+1
		}
		if t.released || t.verdict.Kind != processor.Done {
			g.Others = append(g.Others, f.otherOutcome(t))
			continue
		}
		at := len(lines)
		lines = appendResultLine(lines, t, f.w.ID)
		done = append(done, ledger.DoneJob{
			Entry:   t.entryID,
			Ordinal: t.Ordinal,
			Attempt: t.currentAttempt,
			Line:    lines[at:],
			Trace:   t.processTrace,
			Marked:  t.separatePayload || t.currentAttempt > 1,
		})
		g.Done = g.Done[:len(g.Done)+1] // the append above wrote the job to this place in the shared array
	}
	return groups
}

// otherOutcome returns the outcome of a task that is not done: unstarted, released, throttled,
// deferred, to be retried, or failed.
func (f *feed) otherOutcome(t *task) ledger.OtherJob {
	o := ledger.OtherJob{
		Entry:     t.entryID,
		Ordinal:   t.Ordinal,
		Attempt:   t.currentAttempt,
		Retries:   t.Retries,
		Throttles: t.Throttles,
		Losses:    t.Losses,
		Waits:     t.Waits,
		Queued:    []byte(t.QueuedWithTrace(t.nextTrace())),
		Code:      t.verdict.Code,
		Text:      t.verdict.Message,
	}
	waits := f.w.waits.Load()
	rules := Rules{
		MaxRetries: f.w.cfg.retriesOf(t.terms), MaxThrottles: f.w.cfg.MaxThrottles,
		Backoff: waits.backoff, MaxBackoff: waits.maxBackoff,
	}
	kind, wait := rules.Next(t.verdict, t.Retries, t.Throttles)
	refused := t.refusedWithOthers(f.w.cfg.MaxThrottles)
	switch {
	case t.released && !t.inFlight:
		o.Kind = ledger.OutcomeUnstarted
	case t.released:
		o.Kind = ledger.OutcomeReleased
	case refused:
		o.Kind, o.Throttles, o.Delay = ledger.OutcomeRetry, t.Throttles+1, jittered(rules.wait(0))
	case kind == processor.Throttle:
		o.Kind, o.Throttles, o.Delay = ledger.OutcomeThrottled, t.Throttles+1, wait
		if t.verdict.After == 0 {
			o.Delay = -jittered(wait) // negative: Redis may choose a longer wait
		}
	case kind == processor.Defer:
		o.Kind, o.Delay = ledger.OutcomeDeferred, wait
	case kind == processor.RetryLater:
		o.Kind, o.Retries, o.Delay = ledger.OutcomeRetry, t.Retries+1, jittered(wait)
	default:
		o.Kind, t.deadReason = ledger.OutcomeFailed, telemetry.DeadPermanent
		switch t.verdict.Kind {
		case processor.RetryLater:
			t.deadReason = telemetry.DeadRetries
		case processor.Throttle:
			t.deadReason = telemetry.DeadThrottles
		}
	}
	return o
}

// nextTrace returns the trace context that is stored with the job, so that the span of its next
// step continues the trace: that of this attempt's span, or else the one that the job came with. It
// is "" when the job is not sampled.
func (t *task) nextTrace() string {
	if t.processTrace != "" {
		return t.processTrace
	}
	return t.Trace
}

// jittered returns d less a random part of up to a tenth, so that jobs that failed together are not
// retried together.
func jittered(d time.Duration) time.Duration { return d - time.Duration(rand.Int64N(int64(d)/10+1)) }

// resultLineBytes is about the size of a result line without its data, key and last error.
const resultLineBytes = 200

// appendResultLine appends the task's line in its group's results to b: a JSON object with ordinal,
// the key if the job has one, duration_ms, attempts, started_ms, worker, the last error of an
// earlier attempt if the job has one, and data. It is written by hand because
// encoding/json would check the data again; BenchmarkResultLine compares both.
func appendResultLine(b []byte, t *task, worker string) []byte {
	b = append(b, `{"ordinal":`...)
	b = strconv.AppendInt(b, t.Ordinal, 10)
	if key := t.Key(); key != "" {
		text, _ := json.Marshal(key) // a string can always be encoded
		b = append(append(b, `,"key":`...), text...)
	}
	b = append(b, `,"duration_ms":`...)
	b = appendMillis(b, t.runTime)
	b = append(b, `,"attempts":`...)
	b = strconv.AppendInt(b, int64(t.currentAttempt), 10)
	b = append(b, `,"started_ms":`...)
	b = strconv.AppendInt(b, t.startedAt.UnixMilli(), 10)
	b = append(append(append(b, `,"worker":"`...), worker...), '"') // an id needs no escapes
	if e := t.lastError; e != nil {
		text, _ := json.Marshal(api.JobError{Code: e.Code, Error: e.Text, Attempt: e.Attempt, At: e.At}) // as above
		b = append(append(b, `,"last_error":`...), text...)
	}
	b = append(b, `,"data":`...)
	b = append(b, t.result...)
	return append(b, '}')
}

// appendMillis appends d in milliseconds, with up to three decimals and no trailing zeros. It cuts
// off parts of a microsecond.
func appendMillis(b []byte, d time.Duration) []byte {
	us := d.Microseconds()
	b = strconv.AppendInt(b, us/1000, 10)
	part := us % 1000
	if part == 0 {
		return b
	}
	b = append(b, '.', byte('0'+part/100))
	if part%100 != 0 {
		b = append(b, byte('0'+part/10%10))
	}
	if part%10 != 0 {
		b = append(b, byte('0'+part%10))
	}
	return b
}

// reportQueue holds the tasks whose outcome is set and whose report has not begun. Adding never
// blocks, so that neither the watchdog nor a stopping process waits for Redis; the bound on held
// tasks bounds the queue too. Many goroutines add tasks; only one, the taker, takes them out.
type reportQueue struct {
	mu     sync.Mutex
	tasks  []*task
	wakeAt int // number of tasks that the taker waits for; add then sends a token on wake
	closed bool
	wake   chan struct{} // gets a token when wakeAt tasks are there, or when the queue is closed
}

func newReportQueue() *reportQueue { return &reportQueue{wake: make(chan struct{}, 1)} }

// add appends a task. It wakes the taker when there are as many tasks as the taker waits for.
func (q *reportQueue) add(t *task) {
	q.mu.Lock()
	q.tasks = append(q.tasks, t)
	enough := len(q.tasks) == q.wakeAt
	q.mu.Unlock()
	if enough {
		q.signal()
	}
}

// close tells the taker that no task will be added any more.
func (q *reportQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.signal()
}

// signal puts a token into wake, unless there is one.
func (q *reportQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// hasAtLeast reports whether the queue holds n tasks or is closed, so that the taker need not wait.
// If it returns false, wake gets a token as soon as one of both is true.
func (q *reportQueue) hasAtLeast(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.wakeAt = n
	return len(q.tasks) >= n || q.closed
}

// wait blocks until there is a task and returns true, or returns false when the queue is closed and
// empty.
func (q *reportQueue) wait() bool {
	for !q.hasAtLeast(1) {
		<-q.wake
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.tasks) > 0
}

// take removes and returns the oldest tasks: up to the number most, and until they have bytes bytes
// together. The last task may exceed that.
func (q *reportQueue) take(most, bytes int) []*task {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := 0
	for n < min(most, len(q.tasks)) && (n == 0 || bytes > 0) {
		bytes -= q.tasks[n].size()
		n++
	}
	batch := slices.Clone(q.tasks[:n])
	q.tasks = slices.Delete(q.tasks, 0, n)
	return batch
}
