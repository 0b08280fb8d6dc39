package presence

import (
	"math/bits"
	"time"
)

// Delays counts the jobs that a process has started, by the time from when each might start until it
// did. The element 0 counts times below 1 ms, the element i those below 2^i ms, and the last one
// all longer times.
type Delays [24]int64

// Add counts one job.
func (d *Delays) Add(delay time.Duration) {
	d[min(bits.Len64(uint64(max(0, delay.Milliseconds()))), len(d)-1)]++
}

// Since returns what was counted after before, which is an earlier state of the same process; all of
// d if that is impossible, because the process is another one of the same id.
func (d Delays) Since(before Delays) Delays {
	since := d
	for i, n := range before {
		if since[i] -= n; since[i] < 0 {
			return d
		}
	}
	return since
}

// Quantile returns the delay in ms below which the part q of the jobs has started, with linear
// interpolation; ok is false if there are none.
func (d Delays) Quantile(q float64) (ms float64, ok bool) {
	all, below := int64(0), 0.0
	for _, n := range d {
		all += n
	}
	for i, n := range d {
		if rest := q*float64(all) - below; n > 0 && rest <= float64(n) {
			low := float64(int64(1) << i / 2)
			return low + (float64(int64(1)<<i)-low)*rest/float64(n), true
		}
		below += float64(n)
	}
	return 0, false
}
