// Package position computes the positions of users in the queues of the waiting room, without a
// Redis call per user. A broker reads the stream moves of a partition, which says which numbers
// have left the queues, and has a View of each event in which it has users. Views holds the views
// of one partition and hides how they are loaded, followed and repaired.
package position

import (
	"context"
	"time"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// Source reads one partition of the waiting room from Redis. Its methods may be called by several
// goroutines.
type Source interface {
	// Snapshot returns the states of these events, at most waitingroom.MostUsers of them, and the
	// last id of the stream moves, all as of one instant. Unknown events are left out.
	Snapshot(ctx context.Context, events ...string) (waitingroom.Snapshots, error)
	// Numbers yields the numbers of the users who are waiting or away, in pages. It yields every
	// user who is in the queue during the whole call; a user who enters or leaves meanwhile may be
	// omitted. A number may be yielded twice. yield may call the source.
	Numbers(ctx context.Context, event string, yield func(numbers []int64)) error
	// Moves returns entries of the stream moves after an id, in their order. If there are none, it
	// waits for them for up to block; a negative block does not wait.
	Moves(ctx context.Context, after string, block time.Duration) ([]waitingroom.Move, error)
}

// Place is what a user may be shown of the queue.
type Place struct {
	// Known is false if this process has no view of the event, or the view does not include the
	// change number that the caller gave. Then the other fields are not set.
	Known bool
	// Left is true if the number is not in the queue any more; then there is no position.
	Left     bool
	Position int64     // 1 is next
	Total    int64     // length of the queue
	At       time.Time // the position is exact as of this time, by Redis's clock
	pace     float64   // promotions a second; 0: unknown
}

// ETA returns in how many seconds the user will be promoted if the pace stays the same; false while
// the pace is not known or nobody is promoted.
func (p Place) ETA() (seconds float64, ok bool) {
	if p.pace <= 0 || p.Position <= 0 {
		return 0, false
	}
	return float64(p.Position) / p.pace, true
}
