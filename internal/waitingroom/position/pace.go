package position

import (
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

const (
	// paceWindow is how far back the pace looks.
	paceWindow = time.Minute
	// minPaceWindow is how long promotions are counted before a pace is told. In a shorter time
	// one batch of promotions would look like a high pace.
	minPaceWindow = 3 * time.Second
)

// pace counts the promotions of an event in the snapshots of the last minute.
type pace struct {
	samples []sample // oldest first
}

type sample struct {
	at             time.Time // Redis's time
	promoted, used int64
	full           bool // all slots are in use
}

// add counts a snapshot. While the event is not open, and after a loss of data, the pace is unknown
// and counting begins anew.
func (p *pace) add(at time.Time, s waitingroom.Snapshot) {
	if s.Settings.Mode != api.ModeOpen {
		p.samples = nil
		return
	}
	next := sample{at, s.Counters["promoted"], s.Used, s.Free == 0}
	if n := len(p.samples); n > 0 {
		last := p.samples[n-1]
		if next.promoted < last.promoted || at.Before(last.at) {
			p.samples = p.samples[:0]
		}
	}
	p.samples = append(p.samples, next)
	old := 0
	for at.Sub(p.samples[old].at) > paceWindow {
		old++
	}
	p.samples = p.samples[old:]
}

// perSecond returns the promotions a second, false while they are unknown. While all slots are in
// use, users are promoted only as others go: then promotions into slots that nobody had before do
// not count. Otherwise the first users of an event, who fill its slots at once, would promise a
// pace that the next ones don't have.
func (p *pace) perSecond() (float64, bool) {
	if len(p.samples) < 2 {
		return 0, false
	}
	first, last := p.samples[0], p.samples[len(p.samples)-1]
	window := last.at.Sub(first.at)
	if window < minPaceWindow {
		return 0, false
	}
	n := last.promoted - first.promoted
	if last.full {
		n = max(0, n-max(0, last.used-first.used))
	}
	return float64(n) / window.Seconds(), true
}
