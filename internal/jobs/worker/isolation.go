package worker

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// suspect reports whether the job was in flight when a worker process died. Such a job may have
// killed the process. So it runs alone in its process: the next crash then hits no other job, and
// the job alone is blamed for it.
func (t *task) suspect() bool { return t.Losses > 0 }

// isolation runs one suspect at a time, while the process holds no other started job: meanwhile no
// slot begins a job, and other jobs that are read are released. It refuses a second suspect: other
// processes can run that one at the same time, and if the first one kills this process, the second
// one need not wait for the end of a lease.
type isolation struct {
	w        *Worker
	waiting  chan *task  // holds the suspect until run takes it
	occupied atomic.Bool // a suspect waits or runs

	readLimit   atomic.Int64 // entries that one read may deliver; 0: no limit
	limitedRead sync.Mutex   // held by a read while readLimit is set
}

func newIsolation(w *Worker) *isolation { return &isolation{w: w, waiting: make(chan *task, 1)} }

// withReadLimit calls read with the most entries that it may read (0: no limit); read returns
// whether suspects were among them. Suspects come in groups, because a dead worker leaves many. So
// a read with a suspect sets the limit to 1, and each limited read without a suspect doubles it;
// from maxBatch on there is no limit. While there is a limit, the partitions read one after the
// other. So the process reads few suspects that it must release, each of which loses an attempt by
// that. An error of read changes no limit and is returned.
func (s *isolation) withReadLimit(read func(most int) (suspects bool, err error)) error {
	most := s.readLimit.Load()
	if most > 0 {
		s.limitedRead.Lock()
		defer s.limitedRead.Unlock()
		most = s.readLimit.Load()
	}
	suspects, err := read(int(most))
	switch {
	case suspects && err == nil:
		s.readLimit.Store(1)
	case most >= maxBatch && err == nil:
		s.readLimit.CompareAndSwap(most, 0)
	case err == nil:
		s.readLimit.CompareAndSwap(most, 2*most)
	}
	return err
}

// add gives isolation a suspect to run and returns true. While isolation has a suspect already, add
// returns false, and the caller must release the new one.
func (s *isolation) add(t *task) bool {
	if !s.occupied.CompareAndSwap(false, true) {
		return false
	}
	s.waiting <- t // does not block: run takes the task before it clears occupied
	return true
}

// busy reports whether a suspect waits or runs. The process then starts no other jobs.
func (s *isolation) busy() bool { return s.occupied.Load() }

// releaseWaiting releases the suspect that was added and that run has not taken yet, if there is
// one.
func (s *isolation) releaseWaiting() {
	select {
	case t := <-s.waiting:
		release(t)
	default:
	}
}

// run runs the suspects that add gives, one after the other, until ctx ends. Their processors run
// under workCtx, which outlives ctx. A suspect that is not started when ctx ends is released, by
// run or by drain.
func (s *isolation) run(ctx, workCtx context.Context) {
	for {
		var t *task
		select {
		case t = <-s.waiting:
		case <-ctx.Done():
			return
		}
		// The tasks that no slot has begun go back.
		release(s.w.slots.block()...)
		if !s.awaitEmptyProcess(ctx) {
			release(t)
			return
		}
		s.runAlone(ctx, workCtx, t)
		s.w.slots.unblock()
		s.occupied.Store(false)
		s.w.held.notify() // feeds may have free capacity again
	}
}

// awaitEmptyProcess waits until all outcomes are reported and the process holds at most the waiting
// suspect and tasks that wait for a pass, and returns true. It returns false when ctx ends first.
func (s *isolation) awaitEmptyProcess(ctx context.Context) bool {
	for {
		changed := s.w.held.nextChange()
		if s.w.held.active.value() <= 1 {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// runAlone starts and runs the suspect t, if its type is gated after it has a pass. It returns when
// its outcome is reported, or when workCtx ends. It releases the suspect, and returns at once, if
// ctx has ended, if its group was cancelled, if its lease was lost, or if it can't be started. It
// starts the suspect only now, not earlier, so that a suspect that is in flight at a crash has
// certainly run alone.
func (s *isolation) runAlone(ctx, workCtx context.Context, t *task) {
	f, held := t.feed, s.w.held
	if t.gate != nil && !t.gate.admitAlone(ctx, t) {
		return
	}
	held.untrack(t)
	if ctx.Err() != nil || t.ctx.stopCause() != nil {
		release(t)
		return
	}
	t = t.forStart()
	started, err := f.startTasks(ctx, t.Type, []*task{t})
	if err != nil {
		release(t)
		return
	}
	if len(started) == 0 {
		return // the job was stale; startTasks has dropped it
	}
	held.track(started...)
	if f.loadPayloads(ctx, started) != nil {
		release(started...)
		return
	}
	s.w.slots.setIsolated(t)
	go s.w.runTask(workCtx, t, new(bool))
	select {
	case <-t.removed:
	case <-workCtx.Done():
	}
	s.w.slots.setIsolated(nil)
}

// These constants define the start rate (see startRate). It is the mean over rateSpan, because
// starts come in bursts. A growing rate shows earlier in the mean over risingSpan: that mean,
// multiplied by risingWeight, is used where it is greater. The factor keeps a burst from looking
// like growth. A mean is computed over minSpan at least. Starts are counted in buckets of
// bucketSpan.
const (
	rateSpan     = 5 * time.Second
	risingSpan   = 2 * time.Second
	risingWeight = 0.8
	minSpan      = 500 * time.Millisecond
	bucketSpan   = 250 * time.Millisecond
)

// runAge is the time constant of the moving average of run times: a run time of that age counts 37%
// as much as a new one.
const runAge = 2 * time.Second

// rates measures, by type, how fast this process starts jobs and how long they run.
type rates struct {
	mu         sync.Mutex      // guards the fields below, and all typeRates
	delays     presence.Delays // of all first attempts
	types      map[string]*typeRates
	reportedAt time.Time // last call of report
}

type typeRates struct {
	firstStart time.Time
	starts     []startBucket // oldest first, none older than rateSpan
	runTime    time.Duration // sum of the run times since the last report
	ran        int           // jobs that ran since the last report
	meanRun    float64       // moving average of run times, ms; 0: no job has ended yet
}

// startBucket has the number of jobs that started between its time `from` and that of the next
// bucket.
type startBucket struct {
	from time.Time
	n    int
}

func newRates() *rates { return &rates{types: map[string]*typeRates{}} }

// of returns the measurements of a type, and adds empty ones for a new type. The caller holds the
// lock.
func (r *rates) of(typ string) *typeRates {
	t := r.types[typ]
	if t == nil {
		t = &typeRates{}
		r.types[typ] = t
	}
	return t
}

// started counts n starts of jobs of type typ, and the delays of those that are first attempts.
func (r *rates) started(now time.Time, typ string, n int, delays ...time.Duration) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range delays {
		r.delays.Add(d)
	}
	t := r.of(typ)
	if t.firstStart.IsZero() {
		t.firstStart = now
	}
	if last := len(t.starts) - 1; last < 0 || now.Sub(t.starts[last].from) >= bucketSpan {
		t.dropOld(now)
		t.starts = append(t.starts, startBucket{from: now})
	}
	t.starts[len(t.starts)-1].n += n
}

// ran records that n jobs of type typ have run, with the sum took of their run times.
func (r *rates) ran(typ string, n int, took time.Duration) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.of(typ)
	t.ran += n
	t.runTime += took
}

// report returns the start rate of each type of which a job was started within rateSpan, in jobs
// per second, and the mean run time of each type of which a job has ever ended, in ms. That mean is
// a moving average: each report adds the mean since the last one. A type without new jobs keeps its
// average. delays are those of all first attempts so far.
func (r *rates) report(now time.Time) (startedPerSecond, runMS map[string]float64, delays presence.Delays) {
	r.mu.Lock()
	defer r.mu.Unlock()
	weight := 1 - math.Exp(-now.Sub(r.reportedAt).Seconds()/runAge.Seconds())
	r.reportedAt = now
	startedPerSecond, runMS = map[string]float64{}, map[string]float64{}
	for typ, t := range r.types {
		if rate := t.startRate(now); rate > 0 {
			startedPerSecond[typ] = rate
		}
		if t.ran > 0 {
			mean := float64(t.runTime) / float64(t.ran) / float64(time.Millisecond)
			if t.meanRun > 0 {
				mean = t.meanRun + (mean-t.meanRun)*weight
			}
			t.ran, t.runTime, t.meanRun = 0, 0, mean
		}
		if t.meanRun > 0 {
			runMS[typ] = t.meanRun
		}
	}
	return startedPerSecond, runMS, r.delays
}

// startRate returns the jobs started per second; 0: none within rateSpan.
func (t *typeRates) startRate(now time.Time) float64 {
	t.dropOld(now)
	all, rising := 0, 0
	for _, b := range t.starts {
		all += b.n
		if now.Sub(b.from) <= risingSpan {
			rising += b.n
		}
	}
	age := max(minSpan, now.Sub(t.firstStart))
	mean := float64(all) / min(rateSpan, age).Seconds()
	return max(mean, risingWeight*float64(rising)/min(risingSpan, age).Seconds())
}

// dropOld removes the buckets that are older than rateSpan.
func (t *typeRates) dropOld(now time.Time) {
	t.starts = slices.DeleteFunc(t.starts, func(b startBucket) bool { return now.Sub(b.from) > rateSpan })
}

// movingAverage is an exponential moving average of durations. Each new duration has the weight
// 1/16. It has no lock, because every job adds to it: of two additions at the same time, one may be
// lost.
type movingAverage struct{ nanoseconds atomic.Int64 }

func (e *movingAverage) add(d time.Duration) {
	old := e.nanoseconds.Load()
	if old == 0 {
		old = int64(d)
	}
	e.nanoseconds.Store(max(1, old+(int64(d)-old)/16))
}

// value returns the average, 0 before the first duration.
func (e *movingAverage) value() time.Duration { return time.Duration(e.nanoseconds.Load()) }
