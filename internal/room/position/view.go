package position

import (
	"math/bits"
	"slices"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

const (
	// wordBits is the number of numbers in a word of the bitmap.
	wordBits = 64
	// maxNumber is the largest number of a user: up to it, Lua counts exactly.
	maxNumber = int64(1) << 53
	// maxSpan is the most numbers in a view's bitmap, from the lowest number in the queue to the
	// last one given: 32 MB.
	maxSpan = int64(1) << 28
	// maxAhead is how far a number in moves may be above the view's tail; a higher one is taken for
	// an error. A load reads the tail again, so a broker that has really missed more recovers by
	// it.
	maxAhead = int64(1) << 24
)

// View knows which numbers of one event have left the queue, and computes from that the position of
// each number in it. The position of a number that stays in the queue never rises.
//
// A View is not safe for concurrent use. But after Rebuild, and until the next change, several
// goroutines may call its reading methods.
type View struct {
	change int64 // the last change number of the unbroken sequence that the view includes
	tail   int64 // the last number that is known to have been given
	base   int64 // the number of the lowest bit: a multiple of wordBits, plus 1. Lower numbers have left

	left  []uint64 // bitmap: this number has left the queue
	gone  int64    // how many numbers have left: base - 1 and the bits that are set
	below []uint32 // for each word, the bits that are set in lower words; valid unless stale
	stale bool

	missed bool // changes are missing, or one could not be understood
}

// Apply adds one change: the numbers in gone have left the queue. It skips a change that the view
// includes already. It returns false if the view needs a load, because an earlier change is missing
// or the numbers make no sense. A view that misses a change still applies later ones: that lowers
// its positions, which are too high only by the missing change. View.Change then stays at the last
// change before the gap.
func (v *View) Apply(change int64, gone []waitingroom.Range) bool {
	if change <= v.change {
		return !v.missed
	}
	if change != v.change+1 || !v.sensible(gone) {
		v.missed = true
	}
	if !v.sensible(gone) {
		return false
	}
	for _, r := range gone {
		v.set(r.First, r.First+r.Count-1)
	}
	v.dropFront()
	if v.missed {
		return false
	}
	v.change = change
	return true
}

// sensible reports whether gone can be the ranges of a real change. This bounds the memory and time
// that a damaged entry can cost.
func (v *View) sensible(gone []waitingroom.Range) bool {
	most := min(v.tail+maxAhead, v.base-1+maxSpan)
	all := int64(0)
	for _, r := range gone {
		if r.First < 1 || r.Count < 1 || r.Count > maxSpan || r.First > most-r.Count+1 {
			return false
		}
		if all += r.Count; all > maxSpan {
			return false
		}
	}
	return true
}

// set marks the numbers from first to last as having left the queue. Both are at least 1.
func (v *View) set(first, last int64) {
	v.tail = max(v.tail, last)
	first = max(first, v.base)
	if first > last {
		return
	}
	from, _ := v.place(first)
	to, _ := v.place(last)
	if missing := to + 1 - len(v.left); missing > 0 {
		v.left = append(v.left, make([]uint64, missing)...)
	}
	for w := from; w <= to; w++ {
		mask := ^uint64(0)
		if w == from {
			mask <<= uint64(first-v.base) % wordBits
		}
		if w == to {
			mask &= ^uint64(0) >> (wordBits - 1 - uint64(last-v.base)%wordBits)
		}
		v.gone += int64(bits.OnesCount64(mask &^ v.left[w]))
		v.left[w] |= mask
	}
	v.stale = true
}

// dropFront removes the words at the front of the bitmap in which every number has left the queue.
func (v *View) dropFront() {
	n := 0
	for n < len(v.left) && v.left[n] == ^uint64(0) {
		n++
	}
	if n > 0 {
		v.left, v.base, v.stale = v.left[n:], v.base+int64(n)*wordBits, true
	}
}

// place returns the index of the word and the bit that stand for a number, which is at least base.
func (v *View) place(number int64) (word int, bit uint64) {
	i := uint64(number - v.base)
	return int(i / wordBits), 1 << (i % wordBits)
}

// Rebuild updates the index that Position needs after changes. Position calls it by itself; a
// caller that shares the view between goroutines must call it after changes, before they read.
func (v *View) Rebuild() {
	if !v.stale {
		return
	}
	v.below = slices.Grow(v.below[:0], len(v.left))[:len(v.left)]
	sum := uint32(0)
	for i, word := range v.left {
		v.below[i] = sum
		sum += uint32(bits.OnesCount64(word))
	}
	v.stale = false
}

// Stale reports whether the view has changed since the last Rebuild.
func (v *View) Stale() bool { return v.stale }

// Position returns how many lower numbers are in the queue, plus 1. It returns false if the number
// has left the queue.
func (v *View) Position(number int64) (pos int64, ok bool) {
	if number < v.base {
		return 0, false
	}
	v.Rebuild()
	if uint64(number-v.base)/wordBits >= uint64(len(v.left)) {
		return number - v.gone, true
	}
	word, bit := v.place(number)
	if v.left[word]&bit != 0 {
		return 0, false
	}
	left := v.base - 1 + int64(v.below[word]) + int64(bits.OnesCount64(v.left[word]&(bit-1)))
	return number - left, true
}

// Extend tells the view that the numbers up to tail have been given to users.
func (v *View) Extend(tail int64) { v.tail = max(v.tail, tail) }

// Tail returns the last number that is known to have been given.
func (v *View) Tail() int64 { return v.tail }

// Total returns the length of the queue.
func (v *View) Total() int64 { return v.tail - v.gone }

// Change returns the change number up to which the view includes all changes without a gap.
func (v *View) Change() int64 { return v.change }

// NeedsLoad tells whether changes are missing.
func (v *View) NeedsLoad() bool { return v.missed }

// Miss marks the view as missing changes, so that it needs a load.
func (v *View) Miss() { v.missed = true }
