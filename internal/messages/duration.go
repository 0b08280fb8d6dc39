package messages

import (
	"errors"
	"math"
	"strconv"
	"time"
)

var errDuration = errors.New(`must be a duration such as "1m30s" or a number of seconds, of at most 292 years`)

// Duration is a time.Duration. In JSON it is read from Go's notation ("1m30s") or a number of
// seconds, and written in Go's notation.
type Duration time.Duration

// String returns d in Go's notation, such as 1m30s.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalJSON encodes d in Go's notation, such as "1m30s".
func (d Duration) MarshalJSON() ([]byte, error) {
	return strconv.AppendQuote(nil, d.String()), nil
}

// UnmarshalJSON decodes Go's notation, or a number of seconds, which it rounds to nanoseconds. null
// leaves d unchanged, as is usual in encoding/json.
func (d *Duration) UnmarshalJSON(data []byte) error {
	switch {
	case len(data) == 0:
		return errDuration
	case data[0] == 'n':
		return nil
	case data[0] == '"':
		parsed, err := time.ParseDuration(string(unquote(data)))
		if err != nil {
			return errDuration // the message omits the value, which may not be logged
		}
		*d = Duration(parsed)
		return nil
	}
	seconds, err := strconv.ParseFloat(string(data), 64)
	ns := math.Round(seconds * float64(time.Second))
	if err != nil || !(ns >= math.MinInt64 && ns < math.MaxInt64) { // in this form the condition refuses NaN too
		return errDuration
	}
	*d = Duration(ns)
	return nil
}
