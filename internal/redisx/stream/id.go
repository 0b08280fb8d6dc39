package stream

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// ID is the id of an entry of a stream: a time in ms since 1970, and a number that tells the entries
// of the same ms apart. The zero ID comes before every entry.
type ID struct{ MS, Seq uint64 }

// ParseID reads an id in the complete form MS-SEQ, as Redis returns it.
func ParseID(text string) (ID, error) {
	ms, seq, _ := strings.Cut(text, "-")
	a, errMS := strconv.ParseUint(ms, 10, 64)
	b, errSeq := strconv.ParseUint(seq, 10, 64)
	if errMS != nil || errSeq != nil {
		return ID{}, fmt.Errorf("%.100q is not the id of a stream entry", text)
	}
	return ID{a, b}, nil
}

func (id ID) String() string {
	return strconv.FormatUint(id.MS, 10) + "-" + strconv.FormatUint(id.Seq, 10)
}

// After says whether the entry id comes after other.
func (id ID) After(other ID) bool {
	return cmp.Or(cmp.Compare(id.MS, other.MS), cmp.Compare(id.Seq, other.Seq)) > 0
}

// InFuture says whether the id is more than futureAge in the future, so that a program and not
// Redis's clock has made it.
func (id ID) InFuture() bool { return id.MS > uint64(time.Now().Add(futureAge).UnixMilli()) }
