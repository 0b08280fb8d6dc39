package position

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// MaxWait is the longest time that Wait takes.
const MaxWait = time.Second

// doubtInterval is the least time between two loads of a view because its length differs from the
// length of the queue in Redis. If the data is damaged, the two never agree, and no load helps.
const doubtInterval = time.Minute

// Event follows the positions of one event (see Views.Open). Its methods may be called by several
// goroutines.
type Event struct {
	views *Views
	name  string

	// users and usedAt are guarded by views.mu.
	users  int       // calls of Open without Close
	usedAt time.Time // the last Open or Close

	mu    sync.RWMutex
	view  *View     // nil: not loaded
	last  stream.ID // the view includes all moves of the event up to this id
	loads int       // how many views the event has had
	asOf  time.Time // Redis's time of the snapshot that the view began with
	load  loadState

	// ahead is a change number that Redis had reached when the last id of the stream moves was
	// aheadAt. If it is missing in the view after reading up to there, entries were lost.
	ahead   int64
	aheadAt stream.ID

	doubtAt  time.Time // a view of another length than the queue is dropped only from then on
	snapshot waitingroom.Snapshot
	seen     bool // there was a snapshot
	pace     pace
	lag      lag
	changed  chan struct{} // closed when callers of Wait should look again; nil: nobody waits
}

// Close undoes one call of Open. After the last one the view is kept for another minute.
func (e *Event) Close() {
	e.views.mu.Lock()
	defer e.views.mu.Unlock()
	e.users--
	e.usedAt = time.Now()
}

// Place returns the place of a number. change is the change number in the answer of the user's call
// of enter. If the view does not include this change yet, the place is not known: the position
// could be higher than one that another broker has shown before.
func (e *Event) Place(number, change int64) Place {
	e.mu.RLock()
	for e.view != nil && e.view.Stale() {
		e.mu.RUnlock()
		e.mu.Lock()
		if e.view != nil {
			e.view.Rebuild()
		}
		e.mu.Unlock()
		e.mu.RLock()
	}
	defer e.mu.RUnlock()
	if e.view == nil || e.view.Change() < change {
		return Place{}
	}
	p := Place{Known: true, At: e.views.progress.asOf(e.asOf)}
	position, ok := e.view.Position(number)
	if !ok {
		p.Left = true
		return p
	}
	p.Position, p.Total = position, max(position, e.view.Total())
	p.pace, _ = e.pace.perSecond()
	return p
}

// Wait waits until the view includes a change number, for MaxWait at most. If the event has no view
// and its queue has at most maxLoadByWaiter users, Wait loads the view, unless another load runs or
// has just failed. It returns whether the view includes the change number now.
func (e *Event) Wait(ctx context.Context, change int64) bool {
	ctx, cancel := context.WithTimeout(ctx, MaxWait)
	defer cancel()
	for {
		done, load, changed := e.await(change)
		switch {
		case done:
			return true
		case ctx.Err() != nil:
			return false
		case load:
			// An error of this load is ignored: a caller of Wait or Round loads again later, and
			// Round returns its errors.
			_ = e.views.load(ctx, []*Event{e}, maxLoadByWaiter, nil)
			continue
		}
		e.views.wakeUp()
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// await returns done = true if the view includes change. Otherwise load says whether the caller
// should load the view, and changed is closed when the caller should look again.
func (e *Event) await(change int64) (done, load bool, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.view != nil && e.view.Change() >= change {
		return true, false, nil
	}
	if e.changed == nil {
		e.changed = make(chan struct{})
	}
	load = e.view == nil && e.load.due() && !e.load.tooLong
	return false, load, e.changed
}

// signal wakes the callers of Wait, so that they check the view again. The caller holds mu.
func (e *Event) signal() {
	if e.changed != nil {
		close(e.changed)
		e.changed = nil
	}
}

// Pace returns the promotions per second; false while the pace is not known.
func (e *Event) Pace() (perSecond float64, ok bool) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.pace.perSecond()
}

// Lag returns how long, by the latest snapshots, users have waited although a slot and a permit were
// free, and nobody was promoted: 0 if brokers keep up.
func (e *Event) Lag() time.Duration {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.lag.now
}

// Snapshot returns the latest snapshot of the event, which is at most about a second old while
// Redis answers; false if there was none yet. If Redis has no such event, the field Event is empty.
func (e *Event) Snapshot() (waitingroom.Snapshot, bool) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.snapshot, e.seen
}

// isUnknown reports whether, by the latest snapshot, Redis has no such event.
func (e *Event) isUnknown() bool {
	s, seen := e.Snapshot()
	return seen && s.Event == ""
}

// noteSnapshot stores a snapshot, and drops the view if it contradicts the snapshot. loads is how
// many loads the event had had when the snapshot was requested: after a newer load the view is not
// compared. last is the last id of moves at the snapshot's instant.
func (e *Event) noteSnapshot(s waitingroom.Snapshot, at time.Time, last stream.ID, loads int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.snapshot, e.seen = s, true
	e.pace.add(at, s)
	e.lag.add(at, s)
	if e.view == nil || e.loads != loads {
		return
	}
	if s.Change < e.view.Change() || s.Tail < e.view.Tail() {
		e.discard() // Redis has lost data, or the event was deleted and declared again
		return
	}
	e.view.Extend(s.Tail)
	if s.Change == e.view.Change() && s.Waiting+s.Away != e.view.Total() && !time.Now().Before(e.doubtAt) {
		e.doubtAt = time.Now().Add(doubtInterval)
		e.discard()
		return
	}
	// Keep an older change number in ahead until the view reaches it or checkAhead reports it as
	// missing. A newer number each second would postpone that decision for ever.
	if e.ahead <= e.view.Change() {
		e.ahead, e.aheadAt = s.Change, last
	}
}

// noteUnknown drops the view because Redis had no such event, unless a load runs or the event was
// loaded since. loads is how many loads it had had when Redis was asked.
func (e *Event) noteUnknown(loads int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.load.running || e.loads != loads {
		return // the event may have been declared since
	}
	e.snapshot, e.seen = waitingroom.Snapshot{}, true
	e.pace, e.lag = pace{}, lag{}
	e.discard()
	e.load.retryAt = time.Now().Add(firstRetry)
}

// discard drops the view, and makes a running load useless, because Redis's data has changed in a
// way that they don't follow. The caller holds mu.
func (e *Event) discard() {
	e.view, e.load.void, e.ahead = nil, true, 0
	e.signal()
}

// read adds an entry of the stream moves to the view and, while a load runs, to the entries that
// the new view will get.
func (e *Event) read(m entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.load.keep(m)
	e.apply(m)
	e.signal()
}

// apply adds an entry of moves to the view. A view that misses earlier changes gets it too: this
// lowers its positions towards the true ones, so that the next load can't raise them. The caller
// holds mu.
func (e *Event) apply(m entry) {
	if e.view == nil || !m.id.After(e.last) {
		return
	}
	if m.move.Change <= e.view.Change() {
		// The view already includes a change with this number, from another entry: Redis has lost
		// data.
		e.discard()
		return
	}
	if e.view.Apply(m.move.Change, m.move.Gone) {
		e.last = m.id
	}
}

// checkAhead marks the view as missing changes if it has not reached the change number ahead,
// although moves were read up to the entry that should contain it: up to the id read, or to the end
// of the stream.
func (e *Event) checkAhead(read stream.ID, end bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.view != nil && e.ahead > e.view.Change() && (end || !e.aheadAt.After(read)) {
		e.view.Miss()
	}
}

// needsLoad tells whether the event is to be loaded now.
func (e *Event) needsLoad() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return (e.view == nil || e.view.NeedsLoad()) && e.load.due()
}

// beginLoad starts a load: from now on, entries of moves are also stored for the new view. It
// returns false if a good view exists or another load runs. It must be called before the load's
// snapshot is taken, so that no entry is missing.
func (e *Event) beginLoad() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.load.running || e.view != nil && !e.view.NeedsLoad() {
		return false
	}
	e.load.running, e.load.void = true, false
	return true
}

// install ends a load: it makes v, built from the snapshot s, the event's view, and applies the
// entries that were read during the load. last is the last id of moves at the snapshot's instant.
// If Redis has lost data during the load, or too many entries were read, it drops v instead.
func (e *Event) install(v *View, s waitingroom.Snapshot, at time.Time, last stream.ID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.signal()
	queue := e.load.queue
	if e.load.void {
		e.load.end(abandoned)
		return
	}
	e.load.end(loaded)
	e.view, e.last, e.asOf, e.ahead, e.loads = v, last, at, 0, e.loads+1
	if !e.seen {
		e.snapshot, e.seen = s, true
	}
	for _, m := range queue {
		e.apply(m)
	}
}

// endLoad ends a load without a view.
func (e *Event) endLoad(r loadResult) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.load.end(r)
	e.signal()
}

// loadCount returns how many views the event has had.
func (e *Event) loadCount() int {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.loads
}

// lose drops the view because Redis has lost data.
func (e *Event) lose() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.discard()
}
