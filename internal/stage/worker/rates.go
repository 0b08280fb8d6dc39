package worker

import (
	"maps"
	"math"
	"sync"
	"time"
)

// A rate is the mean of the last rateSpan: single reports would show how starts come in bursts.
// Who grows fast is noticed in the last risingSpan, of which a part counts, so that a burst does
// not pass for it.
const (
	rateSpan     = 5 * time.Second
	risingSpan   = 2 * time.Second
	risingWeight = 0.8
	minSpan      = 500 * time.Millisecond
	bucketSpan   = 250 * time.Millisecond
)

// startRates counts starts by type and tells their rate.
type startRates struct {
	mu      sync.Mutex
	first   map[string]time.Time // start ever
	buckets []startBucket        // oldest first
}

// startBucket is what was started from a time on until the next bucket begins.
type startBucket struct {
	from time.Time
	n    map[string]int
}

func (s *startRates) add(typ string, n int) { s.addAt(time.Now(), typ, n) }

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

// forget drops what is too old to count.
func (s *startRates) dropOld(now time.Time) {
	old := 0
	for old < len(s.buckets) && now.Sub(s.buckets[old].from) > rateSpan {
		old++
	}
	s.buckets = append(s.buckets[:0], s.buckets[old:]...)
}

// perSecond is the rate of every type that was started lately.
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

// runAge is how long a run time counts, about.
const runAge = 2 * time.Second

// runTimes averages how long jobs run, by type: an exponential moving average in time over the
// means between looks.
type runTimes struct {
	mu   sync.Mutex
	sum  map[string]time.Duration
	n    map[string]int
	mean map[string]float64 // ms
	last time.Time
}

func newRunTimes() *runTimes {
	return &runTimes{sum: map[string]time.Duration{}, n: map[string]int{}, mean: map[string]float64{}}
}

// add counts n jobs that ran for so long together.
func (r *runTimes) add(typ string, n int, took time.Duration) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sum[typ] += took
	r.n[typ] += n
}

// milliseconds are the means of all types of which a job has ended. A type that rests
// keeps its own.
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
