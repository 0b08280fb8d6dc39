package position

import (
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

const (
	// paceWindow is how far back the pace looks.
	paceWindow = time.Minute
	// minPaceWindow is the least time over which promotions are counted before the pace is shown.
	// Over a shorter time, one batch of promotions would look like a high pace.
	minPaceWindow = 3 * time.Second
)

// pace computes the promotions per second of an event from the snapshots of the last minute.
type pace struct {
	samples []sample // oldest first
}

type sample struct {
	at             time.Time // Redis's time
	promoted, used int64
	full           bool // all slots are in use
}

// add adds a snapshot. If the event is not open, it drops all snapshots, also this one. If Redis
// has lost data, it drops the earlier ones. The pace is then unknown for a while.
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

// perSecond returns the promotions per second; false while they are not known. While all slots are
// in use, a promotion counts only if another user gave the slot back. Otherwise the first users of
// an event, who fill its slots at once, would cause a high pace that the next users don't get.
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

// lag measures how long nobody is promoted although somebody could be. A promotion, and a snapshot
// in which nobody could be promoted, ends it.
type lag struct {
	since    time.Time // Redis's time
	promoted int64
	now      time.Duration
}

func (l *lag) add(at time.Time, s waitingroom.Snapshot) {
	due := s.Settings.Mode == api.ModeOpen && s.Waiting > 0 && s.Free > 0
	promoted := s.Counters["promoted"]
	if !due || l.since.IsZero() || promoted != l.promoted {
		l.since, l.promoted = at, promoted
	}
	l.now = at.Sub(l.since)
	if s.Settings.Rate > 0 { // until then there may be no permit
		l.now -= time.Duration(float64(time.Second) / s.Settings.Rate)
	}
	l.now = max(0, l.now)
}
