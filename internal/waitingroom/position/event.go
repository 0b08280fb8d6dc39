package position

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

// MaxWait is the longest time that Wait takes.
const MaxWait = time.Second

// doubtInterval is the time between two loads because the view has another length than the queue.
// The numbers of the queue may contradict its length if the data is damaged; then no load helps.
const doubtInterval = time.Minute

// Event is an event whose positions are followed (see Views.Open). Its methods may be called by
// several goroutines.
type Event struct {
	views *Views
	name  string

	// users and usedAt are guarded by views.mu.
	users  int       // calls of Open without Close
	usedAt time.Time // the last Open or Close

	mu    sync.RWMutex
	view  *View     // nil: not loaded
	last  streamID  // the view includes all moves of the event up to this id
	loads int       // how many views the event has had
	asOf  time.Time // Redis's time of the snapshot that the view began with
	load  loadState

	// ahead is a change number that Redis has reached, when the last id of moves was aheadAt.
	ahead   int64
	aheadAt streamID

	doubtAt  time.Time // a view of another length than the queue is dropped only from then on
	snapshot waitingroom.Snapshot
	seen     bool // there was a snapshot
	pace     pace
	changed  chan struct{} // closed when callers of Wait should look again; nil: nobody waits
}

// Close ends one Open. The view is kept for a while after the last one.
func (e *Event) Close() {
	e.views.mu.Lock()
	defer e.views.mu.Unlock()
	e.users--
	e.usedAt = time.Now()
}

// Place returns the place of a number. change is the change number that the enter of this user
// answered: the view must include it, or the position could be higher than one that another broker
// has shown before.
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

// Wait waits until the view includes a change number, at most MaxWait. If the event has no view and
// its queue is not very long, Wait loads it. It returns whether the view includes the change number
// now.
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
			// After an error the load is repeated later, by a waiter or by Round, which returns
			// its errors.
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

// await returns whether the view includes change; otherwise whether the caller should load it, and
// a channel that is closed when something has changed.
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

// signal lets callers of Wait look again. The caller holds mu.
func (e *Event) signal() {
	if e.changed != nil {
		close(e.changed)
		e.changed = nil
	}
}

// Pace returns the promotions a second, false while they are unknown.
func (e *Event) Pace() (perSecond float64, ok bool) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.pace.perSecond()
}

// Snapshot returns the latest snapshot of the event, which is about a second old at most while
// Redis answers. It returns false before the first one. If there is no such event, the field Event
// is empty.
func (e *Event) Snapshot() (waitingroom.Snapshot, bool) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.snapshot, e.seen
}

// isUnknown says whether the latest snapshot knew no such event.
func (e *Event) isUnknown() bool {
	s, seen := e.Snapshot()
	return seen && s.Event == ""
}

// noteSnapshot takes note of a snapshot of Round, which was requested when the event had had this
// many loads. last is the last id of moves at the same instant.
func (e *Event) noteSnapshot(s waitingroom.Snapshot, at time.Time, last streamID, loads int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.snapshot, e.seen = s, true
	e.pace.add(at, s)
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
	// A number that is not reached yet stays until it is reached or known to be lost. A newer one
	// each second would move that decision away.
	if e.ahead <= e.view.Change() {
		e.ahead, e.aheadAt = s.Change, last
	}
}

// noteUnknown takes note that Redis did not know the event when it had had this many loads.
func (e *Event) noteUnknown(loads int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.load.running || e.loads != loads {
		return // the event may have been declared since
	}
	e.snapshot, e.seen = waitingroom.Snapshot{}, true
	e.pace = pace{}
	e.discard()
	e.load.retryAt = time.Now().Add(firstRetry)
}

// discard drops the view: what it knows is not true any more. The caller holds mu.
func (e *Event) discard() {
	e.view, e.load.void, e.ahead = nil, true, 0
	e.signal()
}

// read adds an entry of moves to the view, or to the queue of the load that runs.
func (e *Event) read(m entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.load.keep(m)
	e.apply(m)
	e.signal()
}

// apply adds an entry of moves to the view. A view with missing changes gets it too: that lowers
// positions towards the true ones, so that the load which follows can't raise them. The caller
// holds mu.
func (e *Event) apply(m entry) {
	if e.view == nil || !m.id.after(e.last) {
		return
	}
	if m.move.Change <= e.view.Change() {
		// The view includes another entry with this number: Redis has lost data.
		e.discard()
		return
	}
	if e.view.Apply(m.move.Change, m.move.Gone) {
		e.last = m.id
	}
}

// checkAhead notes that changes are missing, if the view has not reached a number that Redis had
// reached before, although all moves up to there have been read: up to read, or to the end of the
// stream.
func (e *Event) checkAhead(read streamID, end bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.view != nil && e.ahead > e.view.Change() && (end || !e.aheadAt.after(read)) {
		e.view.Miss()
	}
}

// needsLoad tells whether the event is to be loaded now.
func (e *Event) needsLoad() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return (e.view == nil || e.view.NeedsLoad()) && e.load.due()
}

// beginLoad begins to keep the entries of moves for a load. It returns false if there is a view, or
// another load runs. It comes before the snapshot of the load, so that no entry is missing.
func (e *Event) beginLoad() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.load.running || e.view != nil && !e.view.NeedsLoad() {
		return false
	}
	e.load.running, e.load.void = true, false
	return true
}

// install ends a load with a view as of a snapshot, with the last id of moves at that instant.
func (e *Event) install(v *View, s waitingroom.Snapshot, at time.Time, last streamID) {
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
