package position

import (
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

const (
	// maxLoadByWaiter is the longest queue that a caller of Wait loads itself, in about 75 ms.
	maxLoadByWaiter = 50_000
	// maxQueued is the most entries of moves that are stored for a view while it is loaded. The
	// stream itself is not longer.
	maxQueued = 1 << 16
	// firstRetry and lastRetry are the first and the longest wait before a failed load of an event
	// is repeated. The wait doubles each time.
	firstRetry = time.Second
	lastRetry  = 8 * time.Second
	// shortRetry is the wait before a load is repeated after an error of Redis or the network,
	// which says nothing about the event.
	shortRetry = 100 * time.Millisecond
)

// loadState says whether a load of one event's view is running and when the next may begin.
// Event.mu guards it.
type loadState struct {
	running bool
	queue   []entry // what was read of moves while the load runs
	void    bool    // the load that runs is useless: queue is not complete, or Redis has lost data
	tooLong bool    // the queue of the event is too long to be loaded by a caller of Wait
	retries int     // loads that have failed one after the other
	retryAt time.Time
}

type entry struct {
	id   stream.ID
	move waitingroom.Move
}

type loadResult int

const (
	loaded      loadResult = iota
	abandoned              // the next load may begin at once
	unavailable            // Redis did not answer
	unknown                // there is no such event
	tooLong                // a caller of Wait has left the load to Round
	failed                 // by an error that may concern this event alone
)

// due tells whether a load may begin now.
func (l *loadState) due() bool { return !l.running && !time.Now().Before(l.retryAt) }

// keep adds an entry to the queue of the load that runs, if any. If the queue is full, it makes the
// load useless.
func (l *loadState) keep(m entry) {
	switch {
	case !l.running || l.void:
	case len(l.queue) >= maxQueued:
		l.void, l.queue = true, nil
	default:
		l.queue = append(l.queue, m)
	}
}

// end ends the running load, and sets by its result when the next one may begin.
func (l *loadState) end(r loadResult) {
	l.running, l.queue = false, nil
	wait := time.Duration(0)
	switch r {
	case loaded:
		l.tooLong, l.retries = false, 0
	case tooLong:
		l.tooLong = true
	case unavailable:
		wait = shortRetry
	case unknown:
		wait = firstRetry
	case failed:
		wait = min(firstRetry<<min(l.retries, 10), lastRetry)
		l.retries++
	}
	l.retryAt = time.Now().Add(wait)
}
