package wm

import (
	"context"
	"sync"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// delivery is an entry that this consumer owns until it is acknowledged.
type delivery struct {
	entry   stream.Entry
	working bool // a handler has it; false: it waits for redelivery
	lost    bool // another consumer has claimed it
}

// Bounds of the messages that handlers have at the same time. A handler needs several times the
// bytes of its message, and a few KiB for itself, so handlers may have only a part of all bytes in
// flight. Messages that wait for redelivery count only towards MaxBytes, not towards the part of
// the handlers: a handler may be able to handle them only after a later message.
const (
	workPart = 4       // handlers may have 1/workPart of MaxBytes
	workCost = 8 << 10 // bytes that a handler needs beside its message
)

// inFlight holds the deliveries of one subscription and bounds their number and bytes.
type inFlight struct {
	maxEntries, maxBytes int

	mu      sync.Mutex
	byID    map[string]*delivery
	bytes   int
	working int           // bytes of the deliveries that handlers have
	freed   chan struct{} // receives a value when there may be space
}

func newInFlight(maxEntries, maxBytes int) *inFlight {
	return &inFlight{
		maxEntries: maxEntries,
		maxBytes:   maxBytes,
		byID:       map[string]*delivery{},
		freed:      make(chan struct{}, 1),
	}
}

// add adds an entry. It returns nil if the entry is in flight already: Redis has only delivered it
// to this consumer again.
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

// awaitRoom waits until there is space and returns how many more entries of the given size fit; at
// least one fits while there is any space. It returns 0 if ctx ends first.
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

// work records whether a handler has the delivery. The caller holds the lock.
func (f *inFlight) work(d *delivery, working bool) {
	switch cost := d.entry.Size() + workCost; {
	case working && !d.working:
		f.working += cost
	case !working && d.working:
		f.working -= cost
	}
	d.working = working
}

// setLost marks deliveries that another consumer has claimed. It returns how many were not marked
// before.
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

// dropLost removes a delivery if another consumer has claimed it, and reports whether it did.
func (f *inFlight) dropLost(d *delivery) bool {
	f.mu.Lock()
	lost := d.lost
	f.mu.Unlock()
	if lost {
		f.remove([]string{d.entry.ID})
	}
	return lost
}

// held returns the ids of all deliveries, and in waiting the ids of those that no handler has.
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

// signal wakes the goroutine that waits on c, or the next one that will wait.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
