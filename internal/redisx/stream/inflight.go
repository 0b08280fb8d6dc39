package stream

import (
	"context"
	"slices"
	"sync"
	"time"
)

// delivery is the state of an entry that was delivered to this consumer and is not acknowledged
// yet.
type delivery struct {
	size    int
	working bool // a handler has it; false: it waits to be delivered again
	lost    bool // another consumer has claimed it
}

// workPart and workCost bound the entries that handlers have at the same time. A handler needs
// several times the bytes of an entry, and a few KiB more for each, so handlers may have only a
// part of all bytes in flight. Entries that wait to be delivered again count only towards MaxBytes
// and not towards this part, because their handler may have to wait for a later entry.
const (
	workPart = 4       // handlers may have 1/workPart of MaxBytes
	workCost = 8 << 10 // bytes that a handler needs for an entry beside its own
)

// inFlight records the deliveries of one consumer, and bounds their number and bytes.
type inFlight struct {
	maxEntries, maxBytes int

	mu      sync.Mutex
	byID    map[string]*delivery
	bytes   int
	working int           // bytes of the deliveries that handlers have, with workCost for each
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

// begin adds entries that a handler gets now, and returns them. It leaves out entries that are in
// flight already, and no longer counts them as lost: Redis delivers them again after this consumer
// claims them, from itself or from another one, or in a recreated group.
func (f *inFlight) begin(entries []Entry) (fresh []Entry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range entries {
		if d := f.byID[e.ID]; d != nil {
			d.lost = false
			continue
		}
		d := &delivery{size: e.Size()}
		f.byID[e.ID] = d
		f.bytes += d.size
		f.setWorking(d, true)
		fresh = append(fresh, e)
	}
	return fresh
}

// pause records that entries wait to be delivered again.
func (f *inFlight) pause(entries []Entry) {
	f.mu.Lock()
	for _, e := range entries {
		if d := f.byID[e.ID]; d != nil {
			f.setWorking(d, false)
		}
	}
	f.mu.Unlock()
	signal(f.freed)
}

// resume records that a handler gets paused entries again, and returns these entries. It drops
// paused entries that another consumer has claimed in the meantime.
func (f *inFlight) resume(entries []Entry) (kept []Entry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range entries {
		if d := f.byID[e.ID]; d.lost {
			f.drop(e.ID, d)
		} else {
			f.setWorking(d, true)
			kept = append(kept, e)
		}
	}
	signal(f.freed)
	return kept
}

func (f *inFlight) remove(ids []string) {
	f.mu.Lock()
	for _, id := range ids {
		if d := f.byID[id]; d != nil {
			f.drop(id, d)
		}
	}
	f.mu.Unlock()
	signal(f.freed)
}

// drop removes a delivery. The caller holds the lock.
func (f *inFlight) drop(id string, d *delivery) {
	f.bytes -= d.size
	f.setWorking(d, false)
	delete(f.byID, id)
}

// awaitRoom waits until there is space, and returns how many more entries of the given size may be
// read; at least 1. It returns 0 if ctx ends first.
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

// setWorking records whether a handler has the delivery, and counts its bytes accordingly. The
// caller must hold the lock.
func (f *inFlight) setWorking(d *delivery, working bool) {
	switch cost := d.size + workCost; {
	case working && !d.working:
		f.working += cost
	case !working && d.working:
		f.working -= cost
	}
	d.working = working
}

// setLost marks the deliveries that another consumer has claimed. It returns how many of them it
// had not marked before.
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

// held returns the ids of all deliveries, and the number of those that handlers have now.
func (f *inFlight) held() (ids []string, working int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ids = make([]string, 0, len(f.byID))
	for id, d := range f.byID {
		ids = append(ids, id)
		if d.working {
			working++
		}
	}
	return ids, working
}

const (
	ackBatch  = 200
	ackLinger = 3 * time.Millisecond // wait for more acknowledgements to share the round trip
)

// acker collects the ids of handled entries, and acknowledges and deletes the entries in batches.
// It keeps an id until Redis has confirmed that.
type acker struct {
	reader    *Reader
	stream    string
	confirmed func(ids []string) // called with the ids that Redis has confirmed, batch by batch

	mu   sync.Mutex
	ids  []string
	some chan struct{} // receives a value when there is an id
	full chan struct{} // receives a value when there is a full batch

	sending sync.Mutex
}

// add adds ids; the next flush sends them.
func (a *acker) add(ids []string) {
	if len(ids) == 0 {
		return
	}
	a.mu.Lock()
	a.ids = append(a.ids, ids...)
	n := len(a.ids)
	a.mu.Unlock()
	signal(a.some)
	if n >= ackBatch {
		signal(a.full)
	}
}

// awaitBatch waits until flush should be called: first until there is an id, and then up to 3 ms
// for a full batch. It also returns when ctx ends.
func (a *acker) awaitBatch(ctx context.Context) {
	if len(a.first()) == 0 {
		select {
		case <-a.some:
		case <-ctx.Done():
			return
		}
	}
	linger := time.NewTimer(ackLinger)
	defer linger.Stop()
	select {
	case <-a.full:
	case <-linger.C:
	case <-ctx.Done():
	}
}

// flush sends all ids that were added before, in batches; concurrent calls wait for each other.
// After an error it keeps the ids that Redis has not confirmed, for the next flush. Sending an id
// twice changes nothing.
func (a *acker) flush(ctx context.Context) error {
	a.sending.Lock()
	defer a.sending.Unlock()
	for {
		ids := a.first()
		if len(ids) == 0 {
			return nil
		}
		if err := a.reader.ack(ctx, a.stream, ids...); err != nil {
			return err
		}
		a.mu.Lock()
		a.ids = slices.Delete(a.ids, 0, len(ids))
		a.mu.Unlock()
		a.confirmed(ids)
	}
}

func (a *acker) first() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.ids[:min(len(a.ids), ackBatch)])
}

// signal wakes the goroutine that receives from c, which has a buffer of one. If no goroutine waits
// now, the next receive returns at once.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
