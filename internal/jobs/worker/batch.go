package worker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// batchType is a type whose jobs run in calls of a processor.Batcher. Its jobs gather in batches,
// ready and unstarted: they take no slot, and another process could run them at once if this one
// died. The slot that is free for a batch starts its jobs, and calls the batcher. The pool of slots
// holds the batches that gather.
type batchType struct {
	w       *Worker
	typ     string
	proc    processor.Batcher
	single  processor.Processor // for calls of one
	gate    *gate               // for suspects of a gated type; nil: the type is not gated
	options processor.BatchOptions

	// Guarded by the mutex of the slot pool.
	open  map[batchKey]*batch // batches that are not full
	jobs  int                 // in open and due batches
	bytes int                 // payloads of these jobs
	ahead int                 // jobs that may gather although no slot is free
	gated int                 // batches that wait for a pass, or for a slot with one
	empty []bool              // by partition: the last read of the ready stream has found its end
}

// batchKey is what the jobs of a batch have in common.
type batchKey struct {
	by      string // the tenant, the group, or nothing
	timeout time.Duration
}

// batch is the jobs of one call.
type batch struct {
	of     *batchType
	key    batchKey
	oldest time.Time   // when the first of its jobs was read
	due    *time.Timer // ends the wait for further jobs; nil: it is over

	ctx     jobContext   // of the call
	size    atomic.Int64 // jobs of the call, when it begins
	stopped atomic.Int64 // jobs of the call whose contexts have ended

	// Guarded by the mutex of the slot pool until a slot takes the batch; from then on only that slot
	// changes them, under the mutex.
	tasks    []*task
	bytes    int
	replaced bool // the batch has lost its slot, because a job was abandoned

	// Only of a gated type.
	pass     *sharedPass // nil until the batch was admitted
	admitErr error       // an error of AdmitBatch that decides about the jobs instead of the call
	returned sync.Once
}

// single calls a batcher with one job.
type single struct{ processor.Batcher }

func (s single) Process(ctx context.Context, job processor.Job) (any, error) {
	outcomes, _ := processor.RunBatch(ctx, s, []processor.Job{job.WithContext(ctx)})
	return outcomes[0].Result, outcomes[0].Err
}

// gatedSingle does so for a gated type.
type gatedSingle struct {
	single
	gated processor.GatedBatcher
}

func (s gatedSingle) Admit(ctx context.Context, job processor.Job) (processor.Pass, error) {
	pass, _, err := admitted(s.gated.AdmitBatch(ctx, []processor.Job{job}))
	return pass, err
}

// admitted makes a pass for no job an error.
func admitted(pass processor.Pass, n int, err error) (processor.Pass, int, error) {
	if err == nil && n < 1 {
		err = processor.Deferred(0, "AdmitBatch admitted no job")
	}
	return pass, n, err
}

// sharedPass is a pass that several attempts use: the last one returns it.
type sharedPass struct {
	processor.Pass // nil: the batcher has given none
	holders        atomic.Int64
}

func (p *sharedPass) Into(ctx context.Context) context.Context {
	if p.Pass == nil {
		return ctx
	}
	return p.Pass.Into(ctx)
}

func (p *sharedPass) Return(err error) {
	if p.holders.Add(-1) == 0 && p.Pass != nil {
		p.Pass.Return(err)
	}
}

// returnPass gives the batch's part in its pass back, once.
func (b *batch) returnPass(err error) {
	if b.pass != nil && len(b.tasks) > 0 {
		b.returned.Do(func() { b.tasks[0].give(b.pass, err) })
	}
}

func newBatchType(w *Worker, typ string, proc processor.Batcher, partitions int) (*batchType, error) {
	o, err := proc.Options().Defaults()
	most := w.cfg.Lease / 4
	if err == nil && proc.Options().Wait > most {
		err = fmt.Errorf("option Wait %s: must be at most a quarter of LEASE, %s", o.Wait, most)
	}
	o.Wait = min(o.Wait, most)
	b := &batchType{
		w: w, typ: typ, proc: proc, single: single{proc}, options: o,
		open: map[batchKey]*batch{}, empty: make([]bool, partitions),
	}
	if gated, ok := proc.(processor.GatedBatcher); ok {
		s := gatedSingle{single{proc}, gated}
		b.single, b.gate = s, newGate(w, typ, s)
	}
	return b, err
}

// capacity returns how many more jobs this process may read: those of calls for all free slots, and
// those of one call more if a slot is likely to be free for it soon. A process that serves other
// types, too, reads none ahead, so that these find a free slot.
func (b *batchType) capacity() int {
	if b.w.isolation.busy() {
		return 0
	}
	mean := b.w.expectedRunTime()
	s := b.w.slots
	s.mu.Lock()
	defer s.mu.Unlock()
	b.ahead = 0
	if mean > 0 && time.Duration(s.size)*maxSlotWait >= mean && len(b.w.types) == len(b.w.batches) {
		b.ahead = b.options.Size
	}
	return b.room(s)
}

// room is capacity with the last value of ahead. The caller holds the lock of the pool.
func (b *batchType) room(s *slotPool) int {
	if s.size == 0 || b.bytes >= s.size*b.options.Bytes {
		return 0
	}
	return max(0, s.size-s.active)*b.options.Size + b.ahead - b.jobs
}

// complete reports whether the open batches can expect no further jobs now, so that a free slot
// should take them as they are. The caller holds the lock of the pool.
func (b *batchType) complete(s *slotPool) bool {
	return !slices.Contains(b.empty, false) || b.room(s) <= 0
}

// mayRun reports whether a free slot may take a batch that has no pass: of a gated type, no more
// batches get a pass than slots are free. The caller holds the lock of the pool.
func (b *batchType) mayRun(s *slotPool) bool { return b.gate == nil || b.gated < s.size-s.active }

// batchFeed reads the ready stream of one batch type in one partition.
type batchFeed struct {
	feed  *feed
	of    *batchType
	more  bool                         // the last read has not found the end of the stream
	terms map[string]ledger.GroupTerms // of the groups of the last entries
}

// step reads one batch of entries and lets their jobs gather. If the process should read no more
// jobs now, step only waits until that may have changed. It always returns 0 as the time to wait.
func (f *batchFeed) step(ctx context.Context) (time.Duration, error) {
	w := f.of.w
	changed := w.held.nextChange()
	n := f.of.capacity()
	if n <= 0 {
		await(ctx, changed, longPause)
		return 0, nil
	}
	block := w.cfg.Block
	if f.more {
		block = 0 // tells at once whether the stream has ended
	}
	more, err := f.feed.readEntries(ctx, []string{f.of.typ}, n, block, f.gatherEntries)
	if err == nil {
		f.more = more
		w.slots.setEmpty(f.of, f.feed.partition.Index(), !more)
	}
	return 0, err
}

// gatherEntries adds the jobs of entries to batches. Suspects and entries that can't be used are
// treated as by startEntries.
func (f *batchFeed) gatherEntries(ctx context.Context, typ string, entries []stream.Entry) (suspects bool) {
	tasks, suspects := f.feed.takeEntries(ctx, typ, entries)
	if len(tasks) == 0 {
		return suspects
	}
	if f.readTerms(ctx, tasks) != nil {
		release(tasks...)
		return suspects
	}
	held := f.of.w.held
	held.move(stateRead, stateGathering, tasks...)
	if f.of.w.isolation.busy() {
		held.notify() // the process may be empty for the suspect now
	}
	if !f.of.w.slots.gather(tasks, time.Now()) {
		release(tasks...)
	}
	return suspects
}

// readTerms sets the terms of tasks, unless a batch has jobs of one group only. Tasks are ordered by
// group.
func (f *batchFeed) readTerms(ctx context.Context, tasks []*task) error {
	if f.of.options.By == processor.ByGroup {
		return nil
	}
	var unknown []string
	known := map[string]ledger.GroupTerms{}
	for i, t := range tasks {
		if i > 0 && tasks[i-1].Group == t.Group {
			continue
		}
		if terms, ok := f.terms[t.Group]; ok {
			known[t.Group] = terms
		} else {
			unknown = append(unknown, t.Group)
		}
	}
	if f.terms = known; len(unknown) > 0 {
		if err := f.feed.retryStep(ctx, "read groups", func(ctx context.Context) error {
			terms, err := ledger.ReadTerms(ctx, f.of.w.Conn.Cmd, f.feed.partition, unknown)
			for i := range terms {
				known[unknown[i]] = terms[i]
			}
			return err
		}); err != nil {
			return err
		}
	}
	for _, t := range tasks {
		t.terms = known[t.Group]
	}
	return nil
}

// keyOf returns the key of the batch that a task may join.
func (b *batchType) keyOf(t *task) batchKey {
	switch b.options.By {
	case processor.ByGroup:
		return batchKey{by: t.Group}
	case processor.ByTenant:
		return batchKey{t.terms.Tenant, t.terms.JobTimeout}
	}
	return batchKey{timeout: t.terms.JobTimeout}
}

// gather adds tasks, which are of one batch type and were read at a time, to its batches. It returns
// false while the pool is blocked or closed: then the caller must release the tasks.
func (s *slotPool) gather(tasks []*task, at time.Time) bool {
	b := tasks[0].batchType
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blocked || s.closed {
		return false
	}
	for _, t := range tasks {
		key := b.keyOf(t)
		into := b.open[key]
		if into != nil && into.bytes+len(t.Payload) > b.options.Bytes {
			s.makeDue(into)
			into = nil
		}
		if into == nil {
			into = &batch{of: b, key: key, oldest: at}
			into.due = time.AfterFunc(b.options.Wait, func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				if b.open[key] == into {
					s.makeDue(into)
					s.change.Signal()
				}
			})
			b.open[key] = into
		}
		into.tasks, into.bytes = append(into.tasks, t), into.bytes+len(t.Payload)
		b.jobs, b.bytes = b.jobs+1, b.bytes+len(t.Payload)
		if len(into.tasks) == b.options.Size {
			s.makeDue(into)
		}
	}
	s.wakeForBatches()
	return true
}

// makeDue makes an open batch wait for a slot. The caller holds the lock.
func (s *slotPool) makeDue(b *batch) {
	b.due.Stop()
	delete(b.of.open, b.key)
	s.queue(b)
}

// queue puts a batch in its place among those that are due. The caller holds the lock.
func (s *slotPool) queue(b *batch) {
	at, _ := slices.BinarySearchFunc(s.due, b, func(a, b *batch) int { return a.oldest.Compare(b.oldest) })
	s.due = slices.Insert(s.due, at, b)
}

// wakeForBatches wakes idle slots if there may be batches for them. The caller holds the lock.
func (s *slotPool) wakeForBatches() {
	n := len(s.due)
	for _, b := range s.batches {
		if b.complete(s) {
			n += len(b.open)
		}
	}
	for range min(s.idle, n) {
		s.change.Signal()
	}
}

// setEmpty says whether the last read of a batch type's ready stream in a partition has found its end.
func (s *slotPool) setEmpty(b *batchType, partition int, empty bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.empty[partition] = empty
	if empty {
		s.wakeForBatches()
	}
}

// firstBatch returns the batch that a free slot should run next: of those that are due, or that can
// expect no further jobs, the one that has waited longest; nil: none. The caller holds the lock.
func (s *slotPool) firstBatch() (first *batch) {
	for _, b := range s.due {
		if b.pass != nil || b.of.mayRun(s) {
			first = b
			break
		}
	}
	for _, of := range s.batches {
		if len(of.open) == 0 || !of.mayRun(s) || !of.complete(s) {
			continue
		}
		for _, b := range of.open {
			if first == nil || b.oldest.Before(first.oldest) {
				first = b
			}
		}
	}
	return first
}

// withdraw removes a batch from those that gather or are due; its jobs still count as gathering. The
// caller holds the lock.
func (s *slotPool) withdraw(b *batch) {
	if b.of.open[b.key] == b {
		s.makeDue(b)
	}
	s.due = slices.DeleteFunc(s.due, func(other *batch) bool { return other == b })
}

// take removes a batch with its jobs. The caller holds the lock.
func (s *slotPool) take(b *batch) {
	s.withdraw(b)
	b.of.jobs, b.of.bytes = b.of.jobs-len(b.tasks), b.of.bytes-b.bytes
	if b.pass != nil {
		b.of.gated--
	}
}

// gathered returns the tasks of all batches that gather or are due. Slots may start them meanwhile.
func (s *slotPool) gathered() (tasks []*task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range s.batches {
		for _, b := range of.open {
			tasks = append(tasks, b.tasks...)
		}
	}
	for _, b := range s.due {
		if b.pass == nil { // otherwise they are tracked
			tasks = append(tasks, b.tasks...)
		}
	}
	return tasks
}

// takeGathered removes and returns the tasks of all batches that gather or are due. The caller holds
// the lock.
func (s *slotPool) takeGathered() (tasks []*task) {
	for _, of := range s.batches {
		for _, b := range of.open {
			s.makeDue(b)
		}
	}
	for len(s.due) > 0 {
		tasks = append(tasks, s.due[0].tasks...)
		go s.due[0].returnPass(errNotStarted)
		s.take(s.due[0])
	}
	return tasks
}

// runBatch starts the jobs of a batch and calls the batcher with them. ctx ends when the process
// stops, and then no job starts; the call runs under workCtx. It sets abandoned as runTask does.
func (w *Worker) runBatch(ctx, workCtx context.Context, b *batch, abandoned *bool) {
	w.held.notify() // the feeds may read more
	defer w.held.notify()
	tasks := w.startBatch(ctx, b)
	if len(tasks) == 0 {
		b.returnPass(errNotStarted)
		return
	}
	w.slots.setTasks(b, tasks)
	w.call(workCtx, b, tasks, abandoned)
}

// admitBatch obtains the pass of a batch that was withdrawn from the pool, for the jobs whose payloads
// have at most the bytes of a call, and gives the batch back, also if AdmitBatch ends the goroutine.
// Until then its jobs are as those of a gated type that wait.
func (w *Worker) admitBatch(ctx context.Context, b *batch) {
	w.held.move(stateGathering, stateAdmitting, b.tasks...)
	w.held.track(b.tasks...)
	var a admission
	n := len(b.tasks)
	defer func() { w.settleBatch(ctx, b, &a, n) }()
	defer func() {
		if r := recover(); r != nil || !a.whole {
			a = admission{err: w.panicked(b.tasks[0], r), pass: a.pass}
			a.verdict = processor.Classify(a.err)
		}
	}()
	jobs, left := make([]processor.Job, 0, n), b.of.options.Bytes
	for i, t := range b.tasks {
		if t.feed.loadPayloads(ctx, []*task{t}) != nil {
			a = admission{err: errNotStarted, verdict: processor.Classify(errNotStarted), whole: true}
			return
		}
		if left -= len(t.loadedPayload); left < 0 && i > 0 { // those from here on gather again
			t.loadedPayload = ""
			break
		}
		jobs = append(jobs, t.job())
	}
	n = len(jobs)
	admitCtx, cancel := context.WithTimeout(ctx, w.cfg.timeoutOf(b.of.typ))
	defer cancel()
	var most int
	a.pass, most, a.err = admitted(b.of.proc.(processor.GatedBatcher).AdmitBatch(admitCtx, jobs)) //nolint:forcetypeassert // b is of a gated type
	if a.verdict, a.whole = processor.Classify(a.err), true; a.err == nil {
		n = min(n, most)
	}
}

// settleBatch makes a batch of the first n jobs wait for a slot, with its pass or with an error that
// decides about it, and has the others gather again. If it was deferred, or the process stops, all
// its jobs end. The jobs that drain has taken meanwhile are left alone.
func (w *Worker) settleBatch(ctx context.Context, b *batch, a *admission, n int) {
	defer w.held.notify()
	next, stopped := stateGathering, ctx.Err() != nil
	if stopped || a.verdict.Kind == processor.Defer {
		next = stateEnded
	}
	var left []*task
	for _, t := range b.tasks {
		switch {
		case !w.held.move(stateAdmitting, next, t):
		case next == stateGathering:
			left = append(left, t)
		default:
			t.released, t.verdict = stopped, a.verdict
			t.spread()
			t.feed.reports.add(t)
		}
	}
	b.pass, b.admitErr = &sharedPass{Pass: a.pass}, a.err
	b.pass.holders.Store(1)
	n = min(n, len(left))
	if !w.slots.giveBack(b, left[:n]) {
		b.returnPass(errNotStarted)
		release(left[:n]...)
	}
	if n == len(left) {
		return
	}
	w.held.untrack(left[n:]...)
	for _, t := range left[n:] {
		t.loadedPayload = ""
	}
	if !w.slots.gather(left[n:], b.oldest) {
		release(left[n:]...)
	}
}

// giveBack makes a batch that was withdrawn wait for a slot with these tasks. It returns false if
// there are none, or while the pool is blocked or closed; the tasks are the caller's then.
func (s *slotPool) giveBack(b *batch, tasks []*task) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.of.jobs, b.of.bytes = b.of.jobs-len(b.tasks), b.of.bytes-b.bytes
	s.change.Signal() // for this batch, or for the next one that may get a pass
	if len(tasks) == 0 || s.blocked || s.closed {
		b.of.gated--
		return false
	}
	b.tasks, b.bytes = tasks, 0
	for _, t := range tasks {
		b.bytes += len(t.Payload)
	}
	b.of.jobs, b.of.bytes = b.of.jobs+len(tasks), b.of.bytes+b.bytes
	s.queue(b)
	return true
}

// startBatch starts the jobs of a batch, and returns those that the call is to run. It releases those
// that were stopped, or that it can't start. A job whose last call was refused as a whole gets a slot
// of its own.
func (w *Worker) startBatch(ctx context.Context, b *batch) (run []*task) {
	byFeed := map[*feed][]*task{}
	for _, t := range b.tasks {
		if b.pass != nil {
			w.held.untrack(t)
		}
		if t.ctx.stopCause() != nil {
			release(t)
			continue
		}
		if b.pass != nil {
			t = t.forStart()
		}
		t.call = b
		byFeed[t.feed] = append(byFeed[t.feed], t)
	}
	left := b.of.options.Bytes
	for f, tasks := range byFeed {
		slices.SortFunc(tasks, byJob)
		fit := w.fitting(ctx, b, tasks, &left)
		for part := range slices.Chunk(fit, maxBatch) {
			started, err := f.startTasks(ctx, b.of.typ, part)
			if err != nil {
				release(part...)
				continue
			}
			for _, t := range started {
				if !w.runsAlone(t) {
					continue
				}
				if t.call = nil; b.pass != nil {
					b.pass.holders.Add(1)
					t.pass, t.admitErr = b.pass, b.admitErr
				}
			}
			w.held.track(started...)
			for _, t := range started {
				if t.call != nil {
					run = append(run, t)
				} else if !w.slots.add([]*task{t}) {
					release(t)
				}
			}
		}
	}
	if ctx.Err() != nil {
		release(run...)
		return nil
	}
	return run
}

// runsAlone reports whether a call of its own should run a started task, because the call of its last
// attempt may have failed for another job's sake: after a refusal always, after a panic or outcomes
// of a wrong number if it is the last attempt.
func (w *Worker) runsAlone(t *task) bool {
	if t.lastError == nil {
		return false
	}
	switch t.lastError.Code {
	case processor.CodeBatchRejected:
		return true
	case processor.CodeBatchLength, codePanic:
		return t.Retries >= w.cfg.retriesOf(t.terms)
	}
	return false
}

// loadedAtOnce bounds the payloads that are loaded before their sizes are known.
const loadedAtOnce = 16

// fitting loads the payloads of tasks of one partition, and returns those with which the call has at
// most its bytes, of which left are left. The others wait for another call; it releases those that it
// can't load.
func (w *Worker) fitting(ctx context.Context, b *batch, tasks []*task, left *int) (fit []*task) {
	most := b.of.options.Bytes
	for part := range slices.Chunk(tasks, loadedAtOnce) {
		if *left > 0 && part[0].feed.loadPayloads(ctx, part) != nil {
			release(part...)
			continue
		}
		for _, t := range part {
			if n := len(t.loadedPayload); *left > 0 && (n <= *left || *left == most) {
				fit, *left = append(fit, t), *left-n
				continue
			}
			*left = 0
			t.call, t.loadedPayload = nil, ""
			w.held.move(stateAdmitted, stateGathering, t)
			if !w.slots.gather([]*task{t}, b.oldest) {
				release(t)
			}
		}
	}
	return fit
}

// call calls the batcher with started tasks, sets their outcomes and queues their reports, also if
// the batcher panics or ends the goroutine.
func (w *Worker) call(ctx context.Context, b *batch, tasks []*task, abandoned *bool) {
	limit, start := tasks[0].terms.JobTimeout, monotonicNow()
	b.ctx.begin(ctx, start, limit)
	defer b.ctx.finish()
	callCtx, callSpan := w.startCallSpan(b, tasks)
	defer callSpan.End()
	var callErr error
	jobs, called := make([]processor.Job, 0, len(tasks)), make([]int, 0, len(tasks))
	ends, spans := make([]attemptEnd, len(tasks)), make([]trace.Span, len(tasks))
	for i, t := range tasks {
		t.runStart = start
		t.ctx.begin(callCtx, start, limit)
		jobCtx, span := w.startSpan(&t.ctx, t)
		spans[i] = span
		if t.loadedPayload == "" {
			ends[i] = endOf(errPayloadLost)
			continue
		}
		jobs, called = append(jobs, w.jobOf(t).WithContext(jobCtx)), append(called, i)
	}
	b.begin(len(tasks))
	w.held.move(stateAdmitted, stateRunning, tasks...)
	defer func() {
		now := monotonicNow()
		w.meanRunTime.add(time.Duration(now - start))
		if callErr != nil && w.hasShortTimeout(tasks[0]) && errors.Is(b.ctx.endCause(now), context.DeadlineExceeded) {
			callErr = context.Canceled
		}
		b.returnPass(callErr)
		for i, t := range tasks {
			if !w.held.move(stateRunning, stateEnded, t) {
				if spans[i] != nil {
					spans[i].End()
				}
				*abandoned = true
				continue
			}
			w.setOutcome(t, spans[i], ends[i], t.ctx.endCause(now), now, limit)
			t.ctx.finish()
			t.spread()
			t.feed.reports.add(t)
		}
	}()
	if len(jobs) > 0 {
		w.callBatcher(callCtx, b, tasks, jobs, called, ends, &callErr)
	}
}

// callBatcher runs a call and sets the ends of the called tasks. A panic, and the end of the
// goroutine, are an error of each of them.
func (w *Worker) callBatcher(
	ctx context.Context, b *batch, tasks []*task, jobs []processor.Job, called []int, ends []attemptEnd, callErr *error,
) {
	whole := false
	defer func() {
		if r := recover(); r != nil || !whole {
			*callErr = w.panicked(tasks[called[0]], r, "jobs", len(called))
			for _, i := range called {
				ends[i] = endOf(*callErr)
			}
		}
	}()
	var outcomes []processor.Outcome[any]
	if b.admitErr != nil {
		*callErr, outcomes = b.admitErr, slices.Repeat([]processor.Outcome[any]{{Err: b.admitErr}}, len(jobs))
	} else {
		if b.pass != nil {
			ctx = b.pass.Into(ctx)
		}
		outcomes, *callErr = processor.RunBatch(ctx, b.of.proc, jobs)
	}
	for k, i := range called {
		ends[i] = w.endOfOutcome(tasks[i], outcomes[k])
	}
	whole = true
}

// endOfOutcome returns how the attempt of one job of a call has ended. A panic of the methods of its
// result or of its error is only this job's.
func (w *Worker) endOfOutcome(t *task, o processor.Outcome[any]) (end attemptEnd) {
	defer func() {
		if r := recover(); r != nil || !end.whole {
			end = endOf(w.panicked(t, r))
		}
	}()
	if end.err = o.Err; end.err == nil {
		end.result, end.err = EncodeResult(o.Result)
	}
	end.verdict, end.whole = processor.Classify(end.err), true
	return end
}

// endOf returns the end of an attempt with one of the worker's own errors.
func endOf(err error) attemptEnd { return attemptEnd{err: err, verdict: processor.Classify(err)} }

// maxLinks bounds the links of a call's span.
const maxLinks = 128

// startCallSpan starts the span of a call, which links to the traces of its sampled jobs, and returns
// its context. If no job is sampled, there is no span.
func (w *Worker) startCallSpan(b *batch, tasks []*task) (context.Context, trace.Span) {
	var links []trace.Link
	for _, t := range tasks {
		if parent := telemetry.ParseTraceParent(t.Trace); t.Trace != "" && parent.IsSampled() && len(links) < maxLinks {
			links = append(links, trace.Link{SpanContext: parent})
		}
	}
	if len(links) == 0 {
		return &b.ctx, trace.SpanFromContext(context.Background())
	}
	attrs := telemetry.MessagingAttributes(telemetry.OpProcess, "process", tasks[0].feed.partition.Ready(b.of.typ))
	attrs = append(attrs, telemetry.MessageCount(len(tasks)))
	attrs = append(attrs, telemetry.GatherTime(time.Since(b.oldest)))
	return w.Tel.Tracer.Start(&b.ctx, "process "+b.of.typ+" batch",
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithLinks(links...), trace.WithAttributes(attrs...))
}

// begin says how many jobs the call has. If all of them were stopped before, it ends the call's
// context.
func (b *batch) begin(jobs int) {
	b.size.Store(int64(jobs))
	if b.stopped.Load() == int64(jobs) {
		b.ctx.stop(errCancelled)
	}
}

// stop says that a job of the call was stopped, and ends the call's context with the last one.
func (b *batch) stop(cause error) {
	if b.stopped.Add(1) == b.size.Load() {
		b.ctx.stop(cause)
	}
}

// share divides a call's time by its jobs, so that a tenant is charged only once for it.
func (t *task) share() {
	if t.call != nil {
		t.runTime /= time.Duration(max(1, t.call.size.Load()))
	}
}

// spread adds a random part of up to a tenth to the wait of a job of a call, because the jobs of a
// call must not all come back together.
func (t *task) spread() {
	if after := t.verdict.After; after > 0 {
		t.verdict.After += time.Duration(rand.Int64N(int64(after)/10 + 1))
	}
}

// refusedWithOthers reports whether a call with several jobs was refused as a whole. The next attempt
// of such a job runs alone. It has used no retry, because it may have been the item of another job
// that was refused; the number of throttles bounds such attempts.
func (t *task) refusedWithOthers(maxThrottles int) bool {
	return t.call != nil && t.call.size.Load() > 1 && t.verdict.Kind == processor.RetryLater &&
		t.verdict.Code == processor.CodeBatchRejected && t.Throttles < maxThrottles
}

// batchSizes returns the most jobs of a call, by type.
func (w *Worker) batchSizes() map[string]int {
	sizes := map[string]int{}
	for typ, b := range w.batches {
		sizes[typ] = b.options.Size
	}
	return sizes
}
