package worker

import (
	"maps"
	"math"
	"sync"
	"time"
)

// A start rate is the mean over rateSpan, because starts come in bursts. But a rate that grows
// shows earlier in the mean over risingSpan. So that mean, multiplied by risingWeight, is used
// where it is greater; the factor keeps a burst from looking like growth. A rate is computed over
// minSpan at least. Starts are counted in buckets of bucketSpan.
const (
	rateSpan     = 5 * time.Second
	risingSpan   = 2 * time.Second
	risingWeight = 0.8
	minSpan      = 500 * time.Millisecond
	bucketSpan   = 250 * time.Millisecond
)

// startRates counts the jobs that this process starts and computes their rate, by type. It is safe
// for concurrent use.
type startRates struct {
	mu      sync.Mutex
	first   map[string]time.Time // time of a type's first start
	buckets []startBucket        // oldest first, none older than rateSpan
}

// startBucket counts the starts by type from one time until the next bucket begins.
type startBucket struct {
	from time.Time      // when the bucket begins
	n    map[string]int // starts by type
}

// add counts n starts of jobs of type typ, now.
func (s *startRates) add(typ string, n int) { s.addAt(time.Now(), typ, n) }

// addAt is add at the time now, for tests.
func (s *startRates) addAt(now time.Time, typ string, n int) {
	if n <= 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.first == nil {
		s.first = map[string]time.Time{}
	}
	if s.first[typ].IsZero() {
		s.first[typ] = now
	}
	if last := len(s.buckets) - 1; last < 0 || now.Sub(s.buckets[last].from) >= bucketSpan {
		s.dropOld(now)
		s.buckets = append(s.buckets, startBucket{from: now, n: map[string]int{}})
	}
	s.buckets[len(s.buckets)-1].n[typ] += n
}

// dropOld removes the buckets that are older than rateSpan. The caller holds the lock.
func (s *startRates) dropOld(now time.Time) {
	old := 0
	for old < len(s.buckets) && now.Sub(s.buckets[old].from) > rateSpan {
		old++
	}
	s.buckets = append(s.buckets[:0], s.buckets[old:]...)
}

// perSecond returns the start rate of each type of which a job was started within rateSpan, in jobs
// per second. It drops older starts.
func (s *startRates) perSecond(now time.Time) map[string]float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropOld(now)
	all, rising := map[string]int{}, map[string]int{}
	for _, b := range s.buckets {
		for typ, n := range b.n {
			all[typ] += n
			if now.Sub(b.from) <= risingSpan {
				rising[typ] += n
			}
		}
	}
	rates := make(map[string]float64, len(all))
	for typ, n := range all {
		ran := max(minSpan, now.Sub(s.first[typ]))
		mean := float64(n) / min(rateSpan, ran).Seconds()
		rates[typ] = max(mean, risingWeight*float64(rising[typ])/min(risingSpan, ran).Seconds())
	}
	return rates
}

// runAge is the time constant of the moving average of run times: a run time of that age counts 37%
// as much as a new one.
const runAge = 2 * time.Second

// runTimes computes the mean run time of jobs by type. Each call of milliseconds adds the mean
// since the last call to an exponential moving average over time.
type runTimes struct {
	mu   sync.Mutex
	sum  map[string]time.Duration // run times since the last call of milliseconds
	n    map[string]int           // jobs since the last call of milliseconds
	mean map[string]float64       // moving average, ms
	last time.Time                // last call of milliseconds
}

func newRunTimes() *runTimes {
	return &runTimes{sum: map[string]time.Duration{}, n: map[string]int{}, mean: map[string]float64{}}
}

// add counts n jobs of type typ that ran for the time took together.
func (r *runTimes) add(typ string, n int, took time.Duration) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sum[typ] += took
	r.n[typ] += n
}

// milliseconds adds the run times since its last call to the moving average, and returns the
// average of each type of which a job has ever ended, in ms. A type without new jobs keeps its
// average.
func (r *runTimes) milliseconds(now time.Time) map[string]float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	weight := 1 - math.Exp(-now.Sub(r.last).Seconds()/runAge.Seconds())
	r.last = now
	for typ, n := range r.n {
		mean := float64(r.sum[typ]) / float64(n) / float64(time.Millisecond)
		if old, known := r.mean[typ]; known {
			mean = old + (mean-old)*weight
		}
		r.mean[typ] = mean
	}
	clear(r.sum)
	clear(r.n)
	return maps.Clone(r.mean)
}
