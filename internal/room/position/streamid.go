package position

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// streamID is the id of an entry of a Redis stream. The zero value is lower than every id of an
// entry.
type streamID struct{ ms, seq uint64 }

// parseStreamID parses an id such as 1700000000000-0. The empty string gives the zero value.
func parseStreamID(text string) (streamID, error) {
	if text == "" {
		return streamID{}, nil
	}
	ms, seq, ok := strings.Cut(text, "-")
	if !ok {
		seq = "0"
	}
	a, err := strconv.ParseUint(ms, 10, 64)
	if err == nil {
		var b uint64
		if b, err = strconv.ParseUint(seq, 10, 64); err == nil {
			return streamID{a, b}, nil
		}
	}
	return streamID{}, fmt.Errorf("%q is not the id of a stream entry", text)
}

func (id streamID) String() string {
	return strconv.FormatUint(id.ms, 10) + "-" + strconv.FormatUint(id.seq, 10)
}

// after tells whether the entry id comes after other.
func (id streamID) after(other streamID) bool {
	return cmp.Or(cmp.Compare(id.ms, other.ms), cmp.Compare(id.seq, other.seq)) > 0
}
