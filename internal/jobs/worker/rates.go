package worker

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

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
	mu         sync.Mutex // guards the fields below, and all typeRates
	types      map[string]*typeRates
	reportedAt time.Time // last call of report
}

// typeRates are the measurements of one type.
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

// started counts n starts of jobs of type typ.
func (r *rates) started(now time.Time, typ string, n int) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
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
// average.
func (r *rates) report(now time.Time) (startedPerSecond, runMS map[string]float64) {
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
	return startedPerSecond, runMS
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
