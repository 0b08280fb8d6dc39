package bench

import (
	"math"
	"time"

	"github.com/bulkaction/bulkaction/internal/journal"
)

// limitRule is a rate limit as it is promised: permits a window, and how a limiter counts them.
type limitRule struct {
	limiter   string // fixed, sliding or token
	window    time.Duration
	perWindow int64
}

// newLimitRule is the rule that a configuration makes: rps·window permits a window, at least 1.
func newLimitRule(limiter string, rps int, window time.Duration) limitRule {
	return limitRule{limiter, window, max(1, int64(rps)*window.Milliseconds()/1000)}
}

// event is a number of permits, or of starts, at a time in µs.
type event struct{ at, n int64 }

// tokenTolerance is what a token limiter's fractions may be off by.
const tokenTolerance = 1e-3

// windowsOver counts the aligned windows in which events break the rule, and by how much at worst. Events
// come by time.
//
//   - fixed: more than perWindow in the window.
//   - sliding: more than perWindow in a span [t, t+window) that ends in the window.
//   - token: more than perWindow·t/window + perWindow in a span t that ends in the window.
func (r limitRule) windowsOver(events []event) (windows int, worst float64) {
	excess := r.excess(events)
	width, last := r.window.Microseconds(), int64(math.MinInt64)
	for i, x := range excess {
		if x <= tokenTolerance {
			continue
		}
		worst = max(worst, x)
		if w := events[i].at / width; w != last {
			windows, last = windows+1, w
		}
	}
	return windows, worst
}

// excess is for each event by how much the spans that end with it break the rule; negative where
// they keep it.
func (r limitRule) excess(events []event) []float64 {
	width := r.window.Microseconds()
	out := make([]float64, len(events))
	var sum, first int64
	level := 0.0
	for i, e := range events {
		switch r.limiter {
		case "token": // as a bucket that leaks: the same as looking at every span
			if i > 0 {
				level = max(0, level-float64(r.perWindow)*float64(e.at-events[i-1].at)/float64(width))
			}
			level += float64(e.n)
			out[i] = level - float64(r.perWindow)
			continue
		case "sliding":
			sum += e.n
			for events[first].at <= e.at-width {
				sum -= events[first].n
				first++
			}
		default:
			if i > 0 && events[i-1].at/width != e.at/width {
				sum = 0
			}
			sum += e.n
		}
		out[i] = float64(sum - r.perWindow)
	}
	return out
}

// usedRatio is the part of the permits that was spent in the whole windows between those of from and of
// to (µs), and how many windows these are. They are aligned to the epoch; those of the sliding
// limiter begin at from.
func (r limitRule) usedRatio(events []event, from, to int64) (ratio float64, windows int) {
	width := r.window.Microseconds()
	begin, end := (from/width+1)*width, to/width*width
	if r.limiter == "sliding" { // its windows are aligned to nothing
		begin, end = from, from+(to-from)/width*width
	}
	if end <= begin {
		return 0, 0
	}
	windows = int((end - begin) / width)
	return float64(sumBetween(events, begin, end)) / float64(int64(windows)*r.perWindow), windows
}

// sumBetween sums up what lies in [from, to).
func sumBetween(events []event, from, to int64) int64 {
	var n int64
	for _, e := range events {
		if e.at >= from && e.at < to {
			n += e.n
		}
	}
	return n
}

// windowCount is how many aligned windows there are from the first event to the last.
func (r limitRule) windowCount(events []event) int {
	if len(events) == 0 {
		return 0
	}
	width := r.window.Microseconds()
	return int(events[len(events)-1].at/width-events[0].at/width) + 1
}

func permitEvents(log journal.Log, of func(journal.PermitEvent) bool) []event {
	var out []event
	for _, p := range log.Permits {
		if of == nil || of(p) {
			out = append(out, event{p.At, p.N})
		}
	}
	return out
}

func startEvents(log journal.Log, of func(journal.StartEvent) bool) []event {
	var out []event
	for _, s := range log.Starts {
		if of == nil || of(s) {
			out = append(out, event{s.At, 1})
		}
	}
	return out
}

func sumEvents(events []event) int64 {
	var n int64
	for _, e := range events {
		n += e.n
	}
	return n
}
