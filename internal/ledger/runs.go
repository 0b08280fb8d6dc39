package ledger

import "strconv"

// runs writes jobs of one group as scripts read them: consecutive ordinals of one attempt as 'lo n
// attempt', joined by spaces.
type runs struct {
	b       []byte
	lo, n   int64
	attempt int
}

// add takes the next job, by ascending ordinal.
func (r *runs) add(ordinal int64, attempt int) {
	if r.n > 0 && ordinal == r.lo+r.n && attempt == r.attempt {
		r.n++
		return
	}
	r.flush()
	r.lo, r.n, r.attempt = ordinal, 1, attempt
}

func (r *runs) flush() {
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

// text ends the last run.
func (r *runs) text() []byte {
	r.flush()
	return r.b
}
