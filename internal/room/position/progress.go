package position

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// progress is how far the stream moves has been read.
type progress struct {
	mu    sync.Mutex
	read  stream.ID // the last id that was read
	set   bool      // read is valid. It is not while no event is followed
	clock time.Duration

	asOfMS atomic.Int64 // all moves before this time have been read, by Redis's clock
}

// position returns the id up to which the stream moves was read; false if reading has not begun.
func (p *progress) position() (stream.ID, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.read, p.set
}

// start lets reading begin behind last, unless it has begun.
func (p *progress) start(last stream.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.set {
		p.read, p.set = last, true
	}
}

// reset ends reading.
func (p *progress) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.read, p.set = stream.ID{}, false
}

// follow compares last, the last id of moves in a snapshot, with requested, the read position when
// the snapshot was requested. If the stream ends before that position, Redis has lost data, and an
// XREAD from there would wait for ever: follow moves the position back to last and returns true. If
// reading has not begun, it begins behind last.
func (p *progress) follow(last, requested stream.ID, set bool) (lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !p.set:
		p.read, p.set = last, true
	case !set: // a load has begun the reading meanwhile, by a snapshot that may be newer
		if p.read.After(last) {
			p.read = last
		}
	case requested.After(last):
		p.read = last
		return true
	}
	return false
}

// setClock notes how far Redis's clock, which shows at now, is ahead of this process's.
func (p *progress) setClock(at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clock = time.Until(at)
}

// advance records that moves was read up to an id. end says that the read came to the end of the
// stream: it got no entry.
func (p *progress) advance(to stream.ID, end bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	asOf := time.Now().Add(p.clock).UnixMilli()
	if !end {
		asOf = int64(min(uint64(asOf), to.MS))
	}
	if asOf > p.asOfMS.Load() {
		p.asOfMS.Store(asOf)
	}
	if to.After(p.read) {
		p.read = to
	}
}

// asOf returns the time as of which positions are exact, in a view that was loaded at began: the
// later of began and the time up to which moves was read.
func (p *progress) asOf(began time.Time) time.Time {
	return time.UnixMilli(max(began.UnixMilli(), p.asOfMS.Load()))
}
