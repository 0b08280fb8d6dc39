package worker

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/lua"
	"github.com/bulkaction/bulkaction/processor"
)

// linger is how long an outcome waits for company while others still run.
const linger = time.Millisecond

// maxRetryAfter bounds what a partner may ask for.
const maxRetryAfter = 24 * time.Hour

// settle reports outcomes in batches until the queue is closed. While one batch is on its way the next one
// gathers, so that batches grow with the load by themselves.
func (p *partition) settle(ctx context.Context) {
	timer := time.NewTimer(linger)
	defer timer.Stop()
	for p.ended.wait() {
		timer.Reset(linger)
		for late := false; !late && p.ended.len() < min(maxBatch, int(p.held.n.Load())); {
			select {
			case <-p.ended.some:
			case <-timer.C:
				late = true
			}
		}
		p.report(ctx, p.ended.take(maxBatch, maxBatchBytes))
	}
}

// report sends a batch until Redis has taken it. A repeated one is stale and changes nothing.
func (p *partition) report(ctx context.Context, batch []*task) {
	for key, tasks := range byStream(batch) {
		slices.SortFunc(tasks, func(a, b *task) int {
			return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Ordinal, b.Ordinal))
		})
		groups := make([]lua.GroupOutcome, 0, 8)
		for _, t := range tasks {
			if n := len(groups); n == 0 || groups[n-1].Group != t.Group {
				groups = append(groups, lua.GroupOutcome{Group: t.Group})
			}
			g := &groups[len(groups)-1]
			if !t.released && t.began.Load() != nil {
				g.Took, g.Ran = g.Took+t.took, g.Ran+1
			}
			p.describe(g, t)
		}
		var r lua.OutcomeReply
		err := p.insist(ctx, "report outcomes", func(ctx context.Context) (err error) {
			r, err = lua.Outcome(ctx, p.conn.Cmd, p.p, key.typ, p.cfg.Congestion, groups)
			return err
		})
		if err != nil && len(tasks) > 1 && ctx.Err() == nil {
			for _, t := range tasks { // one of them may spoil it for the others
				p.report(ctx, []*task{t})
			}
			continue
		}
		p.held.remove(tasks)
		if err != nil {
			p.tel.Log.Error("outcomes could not be reported, the jobs will run again", "type", key.typ, "jobs", len(tasks), "error", err)
		} else if r.Stale > 0 {
			p.metrics.Stale(int(r.Stale))
			p.tel.Log.Info("stale outcomes changed nothing", "type", key.typ, "stale", r.Stale)
		}
	}
}

// describe adds a task to its group's outcome.
func (p *partition) describe(g *lua.GroupOutcome, t *task) {
	if !t.released && t.verdict.Kind == processor.Done {
		g.Done = append(g.Done, lua.DoneJob{
			Entry: t.entry, Ordinal: t.Ordinal, Attempt: t.attempt, Line: resultLine(t), Trace: t.trace,
			Marked: t.large || t.attempt > 1,
		})
		return
	}
	o := lua.OtherJob{
		Entry: t.entry, Ordinal: t.Ordinal, Attempt: t.attempt, Retries: t.Retries, Throttles: t.Throttles, Losses: t.Losses,
		Waits: t.Waits, Queued: []byte(t.QueuedWithTrace(t.nextTrace())), Code: t.verdict.Code, Text: t.verdict.Message,
	}
	retries := t.terms.MaxRetries
	if retries < 0 {
		retries = p.cfg.MaxRetries
	}
	switch {
	case t.released && !t.begun:
		o.Kind = lua.OutcomeUnstarted
	case t.released:
		o.Kind = lua.OutcomeReleased
	case t.verdict.Kind == processor.Throttle && t.Throttles < p.cfg.MaxThrottles:
		o.Kind, o.Throttles = lua.OutcomeThrottled, t.Throttles+1
		o.Delay = min(t.verdict.After, maxRetryAfter)
		if o.Delay == 0 {
			o.Delay = -p.backoff(t.Throttles) // at least, not exactly
		}
		p.metrics.Retried(1)
	case t.verdict.Kind == processor.RetryLater && t.Retries < retries:
		o.Kind, o.Retries, o.Delay = lua.OutcomeRetry, t.Retries+1, p.backoff(t.Retries)
		p.metrics.Retried(1)
	default:
		o.Kind = lua.OutcomeFailed
		p.metrics.DeadLettered(1)
	}
	g.Others = append(g.Others, o)
}

// nextTrace is the context that the job's next step follows.
func (t *task) nextTrace() string {
	if t.trace != "" {
		return t.trace
	}
	return t.Trace
}

// backoff doubles with each earlier try, up to its bound, less a random part of up to a tenth.
func (p *partition) backoff(tries int) time.Duration {
	d := min(p.cfg.Backoff, p.cfg.MaxBackoff)
	for ; tries > 0 && d < p.cfg.MaxBackoff; tries-- {
		d = min(2*d, p.cfg.MaxBackoff)
	}
	return d - time.Duration(rand.Int64N(int64(d)/10+1))
}

// resultLine is a job's line in the group's results.
func resultLine(t *task) []byte {
	b := make([]byte, 0, 72+len(t.result))
	b = append(b, `{"ordinal":`...)
	b = strconv.AppendInt(b, t.Ordinal, 10)
	b = append(b, `,"duration_ms":`...)
	b = strconv.AppendFloat(b, float64(t.took.Microseconds())/1000, 'f', -1, 64)
	b = append(b, `,"attempts":`...)
	b = strconv.AppendInt(b, int64(t.attempt), 10)
	b = append(b, `,"data":`...)
	b = append(b, t.result...)
	return append(b, '}')
}
