package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/attempt"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// linger is how long the first outcome of a batch waits for further ones while other jobs run.
const linger = time.Millisecond

// reportOutcomes reports the outcomes in the report queue to Redis, and adds them to the metrics,
// until the queue is closed and empty. It reports the outcomes of each type in a call of its own.
// While one batch is sent, the next one collects, so batches grow with the load.
func (p *partitionFeed) reportOutcomes(ctx context.Context) {
	timer := time.NewTimer(linger)
	defer timer.Stop()
	for p.reports.wait() {
		timer.Reset(linger)
		for expired := false; !expired && !p.reports.hasAtLeast(min(maxBatch, p.held.active())); {
			select {
			case <-p.reports.wake:
			case <-timer.C:
				expired = true
			}
		}
		batch := p.reports.take(maxBatch, maxBatchBytes)
		slices.SortFunc(batch, func(a, b *task) int { return cmp.Or(cmp.Compare(a.Type, b.Type), byJob(a, b)) })
		for len(batch) > 0 {
			n := 1
			for n < len(batch) && batch[n].Type == batch[0].Type {
				n++
			}
			p.recordMetrics(batch[:n])
			p.reportBatch(ctx, batch[:n])
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
func (p *partitionFeed) recordMetrics(batch []*task) {
	var ran, succeeded, failed, timedOut int
	var took time.Duration
	for _, t := range batch {
		if t.runStart.Load() == 0 {
			continue
		}
		ran, took = ran+1, took+t.runTime
		p.metrics.Waited(t.Waited())
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
		p.metrics.Ran(t.runTime)
	}
	p.rates.ran(batch[0].Type, ran, took)
	p.metrics.Ended(succeeded, failed, timedOut)
}

// reportBatch reports the outcomes of batch, which are of one type and ordered by byJob, and stops
// holding its tasks, whether that works or not. It repeats the call as retryStep does; repeated
// outcomes are stale and change nothing. If Redis refuses the batch, it reports each task on its
// own. A job whose outcome can't be reported runs again after its lease has ended.
func (p *partitionFeed) reportBatch(ctx context.Context, batch []*task) {
	typ, groups := batch[0].Type, p.groupOutcomes(batch)
	var r ledger.OutcomeReply
	err := p.retryStep(ctx, "report outcomes", func(ctx context.Context) (err error) {
		r, err = ledger.Outcome(ctx, p.Conn.Cmd, p.partition, typ, p.cfg.Congestion, groups)
		return err
	})
	if err != nil && len(batch) > 1 && ctx.Err() == nil {
		for i := range batch { // one task may make Redis refuse the whole batch
			p.reportBatch(ctx, batch[i:i+1])
		}
		return
	}
	p.held.remove(batch)
	if err != nil {
		p.Tel.Log.Error("outcomes could not be reported, the jobs will run again",
			"type", typ, "jobs", len(batch), "error", err)
		return
	}
	p.countRepeats(typ, groups)
	p.metrics.DeadLettered(int(r.Failed))
	for _, s := range r.Steps {
		p.Tel.RecordStep(ctx, p.partition.Ready(typ), telemetry.JobStep(s))
	}
	if r.Stale > 0 {
		p.metrics.Stale(int(r.Stale))
		p.Tel.Log.Info("stale outcomes changed nothing", "type", typ, "stale", r.Stale)
	}
}

// countRepeats adds the jobs of a type that will run again to the metrics: those that were
// throttled, deferred, or are retried.
func (p *partitionFeed) countRepeats(typ string, groups []ledger.GroupOutcome) {
	retried := 0
	for _, g := range groups {
		for _, o := range g.Others {
			switch o.Kind {
			case ledger.OutcomeThrottled, ledger.OutcomeRetry:
				retried++
			case ledger.OutcomeDeferred:
				p.metrics.Deferred(typ)
			}
		}
	}
	p.metrics.Retried(retried)
}

// groupOutcomes returns the outcomes of batch, which is ordered by byJob, by group.
func (p *partitionFeed) groupOutcomes(batch []*task) []ledger.GroupOutcome {
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
		if !t.released && t.verdict.Kind != processor.Defer && t.runStart.Load() != 0 {
			g.Took, g.Ran = g.Took+t.runTime, g.Ran+1
		}
		if t.released || t.verdict.Kind != processor.Done {
			g.Others = append(g.Others, p.otherOutcome(t))
			continue
		}
		at := len(lines)
		lines = appendResultLine(lines, t)
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
func (p *partitionFeed) otherOutcome(t *task) ledger.OtherJob {
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
	rules := attempt.Rules{
		MaxRetries: p.cfg.retriesOf(t.terms), MaxThrottles: p.cfg.MaxThrottles,
		Backoff: p.cfg.Backoff, MaxBackoff: p.cfg.MaxBackoff,
	}
	kind, wait := rules.Next(t.verdict, t.Retries, t.Throttles)
	switch {
	case t.released && !t.inFlight:
		o.Kind = ledger.OutcomeUnstarted
	case t.released:
		o.Kind = ledger.OutcomeReleased
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
		o.Kind = ledger.OutcomeFailed
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

// resultLineBytes is the largest size of a result line without its data and key.
const resultLineBytes = 112

// appendResultLine appends the task's line in its group's results to b: a JSON object with ordinal,
// the key if the job has one, duration_ms, attempts and data. It is written by hand because
// encoding/json would check the data again; BenchmarkResultLine compares both.
func appendResultLine(b []byte, t *task) []byte {
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
