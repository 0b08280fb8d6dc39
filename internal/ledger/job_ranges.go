package ledger

import "strconv"

// jobRanges encodes jobs of one group for scripts: each range of consecutive ordinals with the same
// attempt as 'first n attempt', joined by spaces.
type jobRanges struct {
	b       []byte
	lo, n   int64
	attempt int
}

// add adds a job. Its ordinal is higher than those before.
func (r *jobRanges) add(ordinal int64, attempt int) {
	if r.n > 0 && ordinal == r.lo+r.n && attempt == r.attempt {
		r.n++
		return
	}
	r.flush()
	r.lo, r.n, r.attempt = ordinal, 1, attempt
}

func (r *jobRanges) flush() {
	if r.n == 0 {
		return
	}
	if len(r.b) > 0 {
		r.b = append(r.b, ' ')
	}
	r.b = strconv.AppendInt(r.b, r.lo, 10)
	r.b = strconv.AppendInt(append(r.b, ' '), r.n, 10)
	r.b = strconv.AppendInt(append(r.b, ' '), int64(r.attempt), 10)
	r.n = 0
}

// text returns the encoded ranges.
func (r *jobRanges) text() []byte {
	r.flush()
	return r.b
}
