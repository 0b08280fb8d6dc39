package call

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Reply reads the list that a script replied, one value after the other. Each method expects the
// next value to be there and to have its type. The first value that is not fails the reply, and all
// methods return zero from then on. So a caller asks for the error only once, when it has read
// everything: see Done.
type Reply struct {
	values []any
	*reading
}

// reading is shared by a reply and the lists inside it.
type reading struct {
	script string
	unread int // values, of the reply and of those lists that were read
	err    error
}

// Read executes the script as Run does and returns its reply, which after an error of Run has
// failed with that error. A reply that is no list is read as a list of one value.
func (s *Script) Read(ctx context.Context, c redis.Cmdable, keys []string, args []any) *Reply {
	reply, err := s.Run(ctx, c, keys, args)
	if err != nil {
		return Failed(err)
	}
	return s.Reply(reply)
}

// Reply returns a reply that Run has returned, to be read.
func (s *Script) Reply(reply any) *Reply {
	values, ok := reply.([]any)
	if !ok {
		values = []any{reply}
	}
	return &Reply{values, &reading{script: s.name, unread: len(values)}}
}

// Failed returns a reply that has failed with err.
func Failed(err error) *Reply { return &Reply{nil, &reading{err: err}} }

// Done returns v, which was read from the reply or from a list inside it. If the reply has failed,
// or has values that were not read, it returns the error and a zero v instead.
func Done[T any](r *Reply, v T) (T, error) {
	if err := r.Err(); err != nil {
		var zero T
		return zero, err
	}
	return v, nil
}

// Err returns the error that Done returns.
func (r *Reply) Err() error {
	if r.unread > 0 {
		r.fail("%d values too many", r.unread)
	}
	return r.err
}

func (r *reading) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("script %s: unexpected reply: %s", r.script, fmt.Sprintf(format, args...))
	}
}

// Len returns how many values are left; 0 if the reply has failed.
func (r *Reply) Len() int {
	if r.err != nil {
		return 0
	}
	return len(r.values)
}

// More says whether values are left; false if the reply has failed.
func (r *Reply) More() bool { return r.Len() > 0 }

// Peek returns the next value without reading it; nil if there is none.
func (r *Reply) Peek() any {
	if !r.More() {
		return nil
	}
	return r.values[0]
}

func (r *Reply) next() any {
	if !r.More() {
		r.fail("too short")
		return nil
	}
	v := r.values[0]
	r.values = r.values[1:]
	r.unread--
	return v
}

// Text reads a text. A number is read as its decimal digits.
func (r *Reply) Text() string {
	switch v := r.next().(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	default:
		r.fail("%T instead of a text", v)
		return ""
	}
}

// Code reads a text that is one of the codes.
func (r *Reply) Code(codes ...string) string {
	code := r.Text()
	if !slices.Contains(codes, code) {
		r.fail("%.100q instead of %s", code, strings.Join(codes, " or "))
		return ""
	}
	return code
}

// Number reads a whole number. It may be written as a text, also with an exponent, as Redis writes
// the score of a sorted set.
func (r *Reply) Number() int64 {
	switch v := r.next().(type) {
	case int64:
		return v
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err == nil {
			return n
		}
		f, err := strconv.ParseFloat(v, 64)
		if err != nil {
			r.fail("%.100q instead of a number", v)
		}
		return int64(f)
	default:
		r.fail("%T instead of a number", v)
		return 0
	}
}

// Flag reads the number 1 as true and any other number as false.
func (r *Reply) Flag() bool { return r.Number() == 1 }

// Duration reads a number of ms; it may be negative.
func (r *Reply) Duration() time.Duration { return time.Duration(r.Number()) * time.Millisecond }

// Time reads a time in ms since 1970. For 0 and for what is no such time it returns the zero time.
func (r *Reply) Time() time.Time {
	if ms := r.Number(); 0 < ms && ms < 1<<53 {
		return time.UnixMilli(ms)
	}
	return time.Time{}
}

// List reads a list, whose values are then read by themselves.
func (r *Reply) List() *Reply { return &Reply{r.list(), r.reading} }

func (r *Reply) list() []any {
	v := r.next()
	values, ok := v.([]any)
	if !ok {
		r.fail("%T instead of a list", v)
	}
	r.unread += len(values)
	return values
}

// Skip leaves out all values that are left.
func (r *Reply) Skip() {
	r.unread -= len(r.values)
	r.values = nil
}

// Texts reads all values that are left.
func (r *Reply) Texts() []string {
	texts := make([]string, 0, len(r.values))
	for r.More() {
		texts = append(texts, r.Text())
	}
	return texts
}

// Numbers reads all values that are left.
func (r *Reply) Numbers() []int64 {
	numbers := make([]int64, 0, len(r.values))
	for r.More() {
		numbers = append(numbers, r.Number())
	}
	return numbers
}
