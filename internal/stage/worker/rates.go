package worker

import (
	"maps"
	"math"
	"sync"
	"time"
)

// startRates counts starts by type and tells their rate between two looks.
type startRates struct {
	mu   sync.Mutex
	n    map[string]int
	last time.Time
	rate map[string]float64
}

func (s *startRates) add(typ string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n == nil {
		s.n = map[string]int{}
	}
	s.n[typ] += n
}

func (s *startRates) perSecond(now time.Time) map[string]float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	elapsed := now.Sub(s.last).Seconds()
	if !s.last.IsZero() && elapsed > 0.1 {
		s.rate = map[string]float64{}
		for typ, n := range s.n {
			s.rate[typ] = float64(n) / elapsed
		}
	}
	s.n, s.last = map[string]int{}, now
	return s.rate
}

// runAge is how long a run time counts, about.
const runAge = 2 * time.Second

// runTimes averages how long jobs run, by type: an exponential moving average in time over the means between looks.
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

func (r *runTimes) add(typ string, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sum[typ] += took
	r.n[typ]++
}

// milliseconds are the means of all types of which a job has ended. A type that rests keeps its own.
func (r *runTimes) milliseconds(now time.Time) map[string]float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	part := 1 - math.Exp(-now.Sub(r.last).Seconds()/runAge.Seconds())
	r.last = now
	for typ, n := range r.n {
		mean := float64(r.sum[typ]) / float64(n) / float64(time.Millisecond)
		if old, known := r.mean[typ]; known {
			mean = old + (mean-old)*part
		}
		r.mean[typ] = mean
	}
	clear(r.sum)
	clear(r.n)
	return maps.Clone(r.mean)
}
