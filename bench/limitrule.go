package bench

import (
	"math"
	"time"

	"github.com/bulkaction/bulkaction/internal/process/journal"
)

// limitRule is a rate limit against which journals are checked: perWindow permits in each window,
// as the limiter counts windows.
type limitRule struct {
	limiter   string // fixed, sliding or token
	window    time.Duration
	perWindow int64
}

// newLimitRule returns the rule for rps permits a second: rps·window permits in a window, at least
// 1.
func newLimitRule(limiter string, rps int, window time.Duration) limitRule {
	return limitRule{limiter, window, max(1, int64(rps)*window.Milliseconds()/1000)}
}

// event is the number n of permits, or of starts of jobs, at one time (µs).
type event struct{ at, n int64 }

// tokenTolerance is how far (in permits) a token limiter may exceed its limit without a fault: it
// computes with fractions, which are rounded.
const tokenTolerance = 1e-3

// windowsOver counts the aligned windows in which the events exceed the limit, and returns the
// largest excess in permits. Events are ordered by time. What exceeds the limit depends on the
// limiter:
//
//   - fixed: more than perWindow in the window.
//   - sliding: more than perWindow in a span [t, t+window) that ends in the window.
//   - token: more than perWindow·t/window + perWindow in a span of any length t that ends in the
//     window.
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

// excess returns, for each event, by how many permits the spans that end with this event exceed the
// limit; 0 or less if they do not.
func (r limitRule) excess(events []event) []float64 {
	width := r.window.Microseconds()
	out := make([]float64, len(events))
	var sum, first int64
	level := 0.0
	for i, e := range events {
		switch r.limiter {
		case "token": // a leaky bucket: TestTokenLooksAtEverySpan shows that it checks all spans
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

// usedRatio returns the permits that were spent / the permits that the limit gives, in the whole
// windows between from and to (µs), and the number of these windows. It returns 0 and 0 if there is
// none. Windows begin at multiples of their length since 1970; with a sliding limiter the first
// begins at from.
func (r limitRule) usedRatio(events []event, from, to int64) (ratio float64, windows int) {
	width := r.window.Microseconds()
	begin, end := (from/width+1)*width, to/width*width
	if r.limiter == "sliding" { // a sliding window may begin at any time
		begin, end = from, from+(to-from)/width*width
	}
	if end <= begin {
		return 0, 0
	}
	windows = int((end - begin) / width)
	return float64(sumBetween(events, begin, end)) / float64(int64(windows)*r.perWindow), windows
}

// sumBetween returns the sum of the events in [from, to).
func sumBetween(events []event, from, to int64) int64 {
	var n int64
	for _, e := range events {
		if e.at >= from && e.at < to {
			n += e.n
		}
	}
	return n
}

// windowCount returns the number of aligned windows from the first event to the last.
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
