package wm

import (
	"context"
	"sync"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// delivery is an entry that is this consumer's until it is acknowledged.
type delivery struct {
	entry   stream.Entry
	working bool // handed to a handler; otherwise it waits to be
	lost    bool // another consumer has taken it over
}

// A handler takes several times its message's bytes, and a few KiB for itself: of what is in flight
// only a part may be in work. What waits to be handed out again holds up nothing before all bytes
// are used, since what it waits for may be behind it.
const (
	workPart = 4       // of all bytes, one in so many
	workCost = 8 << 10 // bytes, beside the message's
)

// inFlight holds the deliveries of one subscription, within a bound of entries and bytes.
type inFlight struct {
	maxEntries, maxBytes int

	mu      sync.Mutex
	byID    map[string]*delivery
	bytes   int
	working int           // bytes that handlers take
	freed   chan struct{} // signals that there may be room
}

func newInFlight(maxEntries, maxBytes int) *inFlight {
	return &inFlight{
		maxEntries: maxEntries,
		maxBytes:   maxBytes,
		byID:       map[string]*delivery{},
		freed:      make(chan struct{}, 1),
	}
}

// add returns nil for an entry that is here already: it was only delivered to this
// consumer once more.
func (f *inFlight) add(e stream.Entry) *delivery {
	f.mu.Lock()
	defer f.mu.Unlock()
	if old := f.byID[e.ID]; old != nil {
		old.lost = false
		return nil
	}
	d := &delivery{entry: e}
	f.byID[e.ID] = d
	f.bytes += e.Size()
	return d
}

func (f *inFlight) remove(ids []string) {
	f.mu.Lock()
	for _, id := range ids {
		if d := f.byID[id]; d != nil {
			f.bytes -= d.entry.Size()
			f.work(d, false)
			delete(f.byID, id)
		}
	}
	f.mu.Unlock()
	signal(f.freed)
}

// awaitRoom returns how many more entries of a size may come, or 0 when ctx ended first. One may
// always come while there is any room.
func (f *inFlight) awaitRoom(ctx context.Context, size int) int {
	for {
		f.mu.Lock()
		room := f.maxEntries - len(f.byID)
		free, work := f.maxBytes-f.bytes, f.maxBytes/workPart-f.working
		f.mu.Unlock()
		if min(room, free, work) > 0 {
			return max(1, min(room, free/size, work/(size+workCost)))
		}
		select {
		case <-f.freed:
		case <-ctx.Done():
			return 0
		}
	}
}

func (f *inFlight) setWorking(d *delivery, working bool) {
	f.mu.Lock()
	f.work(d, working)
	f.mu.Unlock()
	if !working {
		signal(f.freed)
	}
}

// work is to be called with the lock.
func (f *inFlight) work(d *delivery, working bool) {
	switch cost := d.entry.Size() + workCost; {
	case working && !d.working:
		f.working += cost
	case !working && d.working:
		f.working -= cost
	}
	d.working = working
}

// setLost marks what another consumer has taken over, and returns how many of it were not
// marked before.
func (f *inFlight) setLost(ids []string) (fresh int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range ids {
		if d := f.byID[id]; d != nil && !d.lost {
			d.lost = true
			fresh++
		}
	}
	return fresh
}

// dropLost forgets a delivery that another consumer has taken over, and says whether it was one.
func (f *inFlight) dropLost(d *delivery) bool {
	f.mu.Lock()
	lost := d.lost
	f.mu.Unlock()
	if lost {
		f.remove([]string{d.entry.ID})
	}
	return lost
}

// held returns all ids, waiting those of them that no handler has.
func (f *inFlight) held() (all, waiting []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	all = make([]string, 0, len(f.byID))
	for id, d := range f.byID {
		all = append(all, id)
		if !d.working {
			waiting = append(waiting, id)
		}
	}
	return all, waiting
}

// signal wakes the one who waits on c, or who will.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
