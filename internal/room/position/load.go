package position

import (
	"errors"
	"fmt"
	"math/bits"
)

// ErrSpan means that the lowest number in a queue and the last number given are too far apart for
// the bitmap of a view.
var ErrSpan = errors.New("the numbers of the queue are too far apart")

// Load builds the view of an event from a snapshot with this change number and tail (the last
// number given). pages yields the numbers that are in the queue, in any order, read after the
// snapshot; a number may be yielded twice. All other numbers up to tail count as having left. The
// caller then applies the changes after change; those about users who left during the reading have
// no further effect.
//
// Numbers above tail count as in the queue until a change says that they have left.
func Load(change, tail int64, pages func(yield func(numbers []int64)) error) (*View, error) {
	if change < 0 || tail < 0 || tail > maxNumber {
		return nil, fmt.Errorf("change %d and tail %d: must be 0 or more, and tail at most %d", change, tail, maxNumber)
	}
	present := bitmap{first: tail / wordBits}
	lowest := tail // that does not fit
	err := pages(func(numbers []int64) {
		for _, n := range numbers {
			switch {
			case n < 1 || n > tail:
			case tail-n >= maxSpan:
				lowest = min(lowest, n)
			default:
				present.add(n)
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if tail-lowest >= maxSpan {
		return nil, fmt.Errorf("%w: from %d to %d, at most %d", ErrSpan, lowest, tail, maxSpan)
	}
	return present.view(change, tail), nil
}

// bitmap is a set of numbers that can grow at both ends, because the first page may contain any
// numbers of the queue.
type bitmap struct {
	first int64 // the index of words[0]: it holds the numbers from first * wordBits + 1
	words []uint64
}

func (b *bitmap) add(number int64) {
	word := (number - 1) / wordBits
	if missing := b.first - word; missing > 0 {
		// Grow at the front by at least the present length, so that repeated growth costs linear
		// time in all.
		missing = min(max(missing, int64(len(b.words))), b.first)
		b.words = append(make([]uint64, missing, missing+int64(len(b.words))), b.words...)
		b.first -= missing
	}
	b.reach(word)
	b.words[word-b.first] |= 1 << (uint64(number-1) % wordBits)
}

// reach extends the bitmap at its end so that it has the word with this index, which is not below
// b.first.
func (b *bitmap) reach(word int64) {
	if missing := word - b.first + 1 - int64(len(b.words)); missing > 0 {
		b.words = append(b.words, make([]uint64, missing)...)
	}
}

// view converts the bitmap to a view: the numbers in the bitmap are in the queue, the others up to
// tail have left. The view reuses the bitmap's memory.
func (b *bitmap) view(change, tail int64) *View {
	if tail > 0 {
		b.reach((tail - 1) / wordBits)
	}
	v := &View{change: change, tail: tail, base: b.first*wordBits + 1, left: b.words, stale: true}
	v.gone = v.base - 1
	for i, word := range v.left {
		word = ^word
		if last := tail - v.base - int64(i)*wordBits; last < wordBits-1 {
			word &= 1<<(last+1) - 1
		}
		v.left[i] = word
		v.gone += int64(bits.OnesCount64(word))
	}
	v.dropFront()
	return v
}
