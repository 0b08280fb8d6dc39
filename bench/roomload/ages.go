package roomload

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"
)

// oldest is the age in ms that an older frame counts as.
const oldest = 60_000

// ages counts position frames by their age in ms.
type ages struct {
	frames atomic.Int64 // of all kinds
	counts [oldest + 1]atomic.Int64
}

func (a *ages) add(age time.Duration) {
	a.counts[min(max(0, age.Milliseconds()), oldest)].Add(1)
}

func (a *ages) reset() {
	a.frames.Store(0)
	for i := range a.counts {
		a.counts[i].Store(0)
	}
}

func (a *ages) byMS() map[int]int64 {
	out := map[int]int64{}
	for i := range a.counts {
		if n := a.counts[i].Load(); n > 0 {
			out[i] = n
		}
	}
	return out
}

// AgePercentile returns the smallest age (ms) that at least p percent of the frames do not exceed;
// 0 without frames. ages has the number of frames of each age.
func AgePercentile(ages map[int]int64, p float64) float64 {
	var all, sum int64
	for _, n := range ages {
		all += n
	}
	for _, ms := range slices.Sorted(maps.Keys(ages)) {
		if sum += ages[ms]; float64(sum) >= p/100*float64(all) {
			return float64(ms)
		}
	}
	return 0
}
